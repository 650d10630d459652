package mpssim

import (
	"strings"
	"testing"
)

// variantTests says, for each second variant, how both are told apart: see runs
// something and says what it saw.
var variantTests = map[string]func(w *world) string{
	"clients-die-with-daemon": func(w *world) string { // more in TestClientsOutliveTheDaemon
		w.daemon("-multiuser-server")
		w.server()
		c := w.client("--memory", "1GiB", "--tick", "20ms")
		c.says("allocated")
		if _, err := KillDaemon(w.dir, w.gpuA); err != nil {
			w.t.Fatal(err)
		}
		before := strings.Count(c.output(), "tick")
		var what string
		eventually(w.t, "an error, or three ticks more", func() bool {
			out := c.output()
			if strings.Contains(out, "(806)") {
				what = "806"
			} else if strings.Count(out, "tick") >= before+3 {
				what = "lives"
			}
			return what != ""
		}, c.output)
		return what
	},
	"server-beside-orphan": func(w *world) string { // more in TestExclusiveProcess
		w.computeMode("3")
		w.daemon("-multiuser-server")
		w.server()
		if _, err := KillDaemon(w.dir, w.gpuA); err != nil {
			w.t.Fatal(err)
		}
		eventually(w.t, "the daemon's end", func() bool { pids, _ := Daemons(w.dir, w.gpuA); return len(pids) == 0 })
		d := w.daemon("-multiuser-server")
		w.control("start_server -uid 0")
		var what string
		eventually(w.t, "an outcome", func() bool {
			switch out := d.output(); {
			case strings.Contains(out, "Ready"):
				what = "ready"
			case strings.Contains(out, "exited with status 1"):
				what = "failed"
			}
			return what != ""
		}, d.output)
		return what
	},
	"uuid-limit-ignored": func(w *world) string {
		w.daemon("-multiuser-server")
		c := w.clientWith([]string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + w.gpuA + "=1G"})
		c.says("device 0: ")
		return c.output()
	},
	"device-clients-in-one-line": func(w *world) string {
		w.daemon("-multiuser-server")
		w.server()
		w.client("--memory", "1GiB").says("allocated")
		out, _ := w.control("get_device_client_list")
		return anyNumber.ReplaceAllString(out, "PID")
	},
	"version-sentence": func(w *world) string {
		out, _, _ := run(w.t, w.env, 0, "", w.bin+"/"+ControlName, "-v")
		return out
	},
}

func TestEachInferredBehaviourHasASecondVariant(t *testing.T) {
	seen := map[string]bool{}
	for _, b := range Behaviours {
		if (b.Evidence == Inferred) != (b.Variant != "") || (b.Variant == "") != (b.Else == "") {
			t.Errorf("%s: evidence %s, variant %q, else %q", b.Says, b.Evidence, b.Variant, b.Else)
		}
		if b.Variant == "" {
			continue
		}
		seen[b.Variant] = true
		t.Run(b.Variant, func(t *testing.T) {
			see := variantTests[b.Variant]
			if see == nil {
				t.Fatal("no test tells it apart")
			}
			strip := func(w *world) string { return strings.NewReplacer(w.dir, "DIR", w.gpuA, "GPU").Replace(see(w)) }
			first, second := strip(newWorld(t)), strip(newWorld(t, withVariant(b.Variant)))
			if first == second {
				t.Errorf("both: %s", first)
			}
		})
	}
	for name := range variantTests {
		if !seen[name] {
			t.Errorf("variant %s is not in the table", name)
		}
	}
}
