package main_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// What is only inferred of NVIDIA's software may be otherwise: the same story
// holds under every second variant of the simulators.
func TestUnderEveryVariant(t *testing.T) {
	t.Parallel()
	groups := map[string][]string{ // variants that can be so at once
		"clients in both lists": {"mps-clients-in-compute-list", "memory-v2-not-supported", "lost-gpu-keeps-handle", "count-fixed-at-init",
			"event-wait-fails-when-lost", "clients-die-with-daemon", "server-beside-orphan", "uuid-limit-ignored", "device-clients-in-one-line", "version-sentence"},
		"clients in the compute list alone": {"mps-clients-only-in-compute-list", "process-memory-not-available", "lost-gpu-not-counted"},
		"a lost GPU hangs":                  {"lost-gpu-hangs"},
	}
	const never = "compute-mode-does-not-stick" // below: such a GPU is never held
	var named []string
	for _, g := range groups {
		named = append(named, g...)
	}
	for _, b := range nvmlsim.Behaviours {
		if b.Variant != "" && b.Variant != never && !slices.Contains(named, b.Variant) {
			t.Errorf("no group tries %s", b.Variant)
		}
	}
	for _, b := range mpssim.Behaviours {
		if b.Variant != "" && !slices.Contains(named, b.Variant) {
			t.Errorf("no group tries %s", b.Variant)
		}
	}
	for name, variants := range groups {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, 80*gib, 80*gib)
			setVariants(t, r, variants)
			r.want("one", shared(50*gib, 0, "run", "--memory", "1GiB", "--stay"))
			r.want("two", shared(20*gib, 0, "run", "--memory", "1GiB", "--stay"))
			r.start()
			r.until("both run on a held GPU", func() bool { return r.attached("one") && r.attached("two") && r.gpu(0).Held })
			r.until("what they use is seen as theirs, or said to be unknown", func() bool {
				g := r.gpu(0)
				return len(g.Slices) == 2 && (g.Slices[0].UsedMemoryInMiB == gib || slices.Contains(variants, "process-memory-not-available"))
			})
			if r.task("one").Generation > 2 || r.task("two").Generation > 2 {
				t.Error("a capped task was taken for one that goes past MPS")
			}
			was := r.task("one").Generation
			if _, err := mpssim.KillDaemon(r.machine.Dir, r.gpus[0]); err != nil {
				t.Fatal(err)
			}
			r.until("closed", func() bool { return !r.gpu(0).Held })
			r.within(time.Minute, "both run again on held GPUs", func() bool {
				return r.task("one").Generation > was && r.running("one") && r.running("two") && r.gpuOf("one").Held && r.gpuOf("two").Held
			})
			on := r.gpuOf("one")
			if err := r.machine.Lose(on.ID, true); err != nil {
				t.Fatal(err)
			}
			r.within(time.Minute, "a lost GPU is closed", func() bool { g := r.gpu(on.Index); return !g.Held && g.HeldReason != "" })
			if slices.Contains(variants, "lost-gpu-hangs") { // nobody can set the mode of a GPU that hangs
				if err := r.machine.Lose(on.ID, false); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
	t.Run("a compute mode that does not stick", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, 80*gib)
		setVariants(t, r, []string{never})
		r.want("one", shared(50*gib, 0, "run", "--memory", "1GiB"))
		r.start()
		r.until("the reason is said", func() bool { return strings.Contains(r.gpu(0).HeldReason, "compute mode") })
		for _, c := range r.containers() {
			if c.Started() {
				t.Errorf("a capped container was started: %s", c.Name)
			}
		}
		if got := r.task("one").LastStatus; got == api.StatusRunning {
			t.Errorf("the task is %s", got)
		}
	})
}

func setVariants(t *testing.T, r *rig, variants []string) {
	t.Helper()
	for _, v := range variants {
		if slices.ContainsFunc(nvmlsim.Behaviours, func(b nvmlsim.Behaviour) bool { return b.Variant == v }) {
			if err := r.machine.SetVariant(v, true); err != nil {
				t.Fatal(err)
			}
			continue
		}
		for _, uuid := range r.gpus {
			if err := mpssim.SteerGPU(r.machine.Dir, uuid, func(s *mpssim.Steer) { s.Variants = append(s.Variants, v) }); err != nil {
				t.Fatal(err)
			}
		}
	}
}
