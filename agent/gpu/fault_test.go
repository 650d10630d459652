package gpu_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu"
	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
)

func TestAGPUThatHangsTakesNoOtherWithIt(t *testing.T) {
	spec := steer(t, func(*nvmlsim.Spec) {})
	bad, good := spec.GPUs[0].UUID, spec.GPUs[1].UUID
	n := open(t, soon)
	devices(t, n)
	if err := sim.HangOn("*", bad, true); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	_, err := n.Sample(t.Context(), bad)
	var hung *gpu.HungError
	if !errors.As(err, &hung) || hung.UUID != bad || hung.Call != "Sample" || !errors.Is(err, gpu.ErrHung) {
		t.Fatalf("the GPU that hangs: %v", err)
	}
	if took := time.Since(begin); took < soon || took > 20*soon {
		t.Errorf("told after %s, the limit is %s", took, soon)
	}
	threads := countThreads(t)
	for range 100 {
		begin := time.Now()
		if _, err := n.ComputeMode(t.Context(), bad); !errors.Is(err, gpu.ErrHung) || time.Since(begin) > soon {
			t.Fatalf("while it hangs: %v after %s", err, time.Since(begin))
		}
	}
	if now := countThreads(t); now > threads+4 {
		t.Errorf("%d threads after 100 calls of a GPU that hangs, %d before", now, threads)
	}
	if _, err := n.Sample(t.Context(), good); err != nil {
		t.Errorf("the other GPU: %v", err)
	}
	all := devices(t, n)
	if len(all) != 2 || !errors.Is(all[0].Err, gpu.ErrHung) || all[0].UUID != bad || all[0].TotalMiB != 143771 || all[1].Err != nil {
		t.Errorf("devices: %+v", all)
	}
	if h := n.Hung(); len(h) != 2 { // the GPU's own lane, and the one that lists its index
		t.Errorf("hung: %v", h)
	}
	if err := sim.HangOn("*", bad, false); err != nil {
		t.Fatal(err)
	}
	until(t, "the GPU answers again", func() bool { _, err := n.Sample(t.Context(), bad); return err == nil })
	until(t, "nothing hangs", func() bool { return len(n.Hung()) == 0 })
	if all := devices(t, n); all[0].Err != nil {
		t.Errorf("after it came back: %v", all[0].Err)
	}
}

func countThreads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(tasks)
}

func TestOneCallHangs(t *testing.T) {
	spec := steer(t, func(*nvmlsim.Spec) {})
	uuid := spec.GPUs[0].UUID
	for _, call := range []string{"DeviceGetCount", "DeviceGetComputeMode", "DeviceSetComputeMode", "DeviceGetUtilizationRates",
		"DeviceGetMemoryInfo_v2", "DeviceGetComputeRunningProcesses", "DeviceGetMPSComputeRunningProcesses"} {
		t.Run(call, func(t *testing.T) {
			n := open(t, soon)
			if err := sim.Hang(call, true); err != nil {
				t.Fatal(err)
			}
			var err error
			switch call {
			case "DeviceGetCount":
				_, err = n.Devices(t.Context())
			case "DeviceSetComputeMode":
				err = n.SetComputeMode(t.Context(), uuid, gpu.ComputeDefault)
			default:
				_, err = n.Sample(t.Context(), uuid)
			}
			if !errors.Is(err, gpu.ErrHung) {
				t.Errorf("%v", err)
			}
			if err := sim.Hang(call, false); err != nil {
				t.Fatal(err)
			}
			until(t, "it comes back", func() bool { return len(n.Hung()) == 0 })
		})
	}
}

func TestInitHangs(t *testing.T) {
	steer(t, func(s *nvmlsim.Spec) { s.Faults = []nvmlsim.Fault{{Call: "Init", Hang: true}} })
	for range 3 {
		_, err := gpu.OpenWith(gpu.Options{LibraryPath: sim.Library(), InitTimeout: soon})
		if !errors.Is(err, gpu.ErrHung) {
			t.Fatalf("open: %v", err)
		}
	}
	if err := sim.Hang("Init", false); err != nil {
		t.Fatal(err)
	}
	until(t, "NVML opens", func() bool {
		n, err := gpu.OpenWith(gpu.Options{LibraryPath: sim.Library(), InitTimeout: soon})
		return err == nil && n.Close() == nil
	})
}

func TestACallerThatGivesUpWaitsNoLonger(t *testing.T) {
	spec := steer(t, func(s *nvmlsim.Spec) {})
	n := open(t, time.Minute)
	if err := sim.Hang("DeviceGetComputeMode", true); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the first is inside, the second waits for the lane
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := n.ComputeMode(ctx, spec.GPUs[0].UUID); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		cancel()
	}
	if err := sim.Hang("DeviceGetComputeMode", false); err != nil {
		t.Fatal(err)
	}
	if _, err := n.ComputeMode(t.Context(), spec.GPUs[0].UUID); err != nil {
		t.Error(err)
	}
}

// A GPU is lost and comes back, in every way that NVML may show it.
func TestLostAndBack(t *testing.T) {
	for _, variant := range []string{"", "lost-gpu-not-counted", "lost-gpu-keeps-handle", "count-fixed-at-init", "lost-gpu-hangs", "event-wait-fails-when-lost"} {
		t.Run("variant "+variant, func(t *testing.T) {
			spec := steer(t, func(s *nvmlsim.Spec) {
				if variant != "" {
					s.Variants = []string{variant}
				}
			})
			bad, good := spec.GPUs[0].UUID, spec.GPUs[1].UUID
			n := open(t, soon)
			events, err := n.Xids(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			before := devices(t, n)
			if err := sim.Lose(bad, true); err != nil {
				t.Fatal(err)
			}
			is := gpu.ErrLost
			if variant == "lost-gpu-hangs" {
				is = gpu.ErrHung
			}
			_, err = n.Sample(t.Context(), bad)
			if !errors.Is(err, is) || !strings.Contains(err.Error(), bad) {
				t.Errorf("sample of the lost GPU: %v", err)
			}
			if _, err := n.Sample(t.Context(), good); err != nil {
				t.Errorf("sample of the other: %v", err)
			}
			for range 3 { // again and again: it stays listed, as it was last known
				all := devices(t, n)
				i := 0
				if len(all) == 2 && all[1].UUID == bad {
					i = 1 // not counted any more: the other has moved to its index
				}
				if len(all) != 2 || !errors.Is(all[i].Err, is) || all[i].UUID != bad || all[i].TotalMiB != before[0].TotalMiB || all[1-i].Err != nil {
					t.Fatalf("devices: %+v", all)
				}
			}
			raiseUntilTold(t, events, good, 94)
			if err := sim.Lose(bad, false); err != nil {
				t.Fatal(err)
			}
			until(t, "the GPU is back", func() bool {
				all, err := n.Devices(t.Context())
				return err == nil && len(all) == 2 && all[0].Err == nil && all[0].UUID == bad && all[1].Err == nil
			})
			if _, err := n.Sample(t.Context(), bad); err != nil {
				t.Errorf("sample after it came back: %v", err)
			}
		})
	}
}

// nextXid skips what the listener says of itself.
func nextXid(t *testing.T, events <-chan gpu.Xid) gpu.Xid {
	t.Helper()
	timeout := time.NewTimer(10 * time.Second)
	defer timeout.Stop()
	for {
		select {
		case x, ok := <-events:
			if !ok {
				t.Fatal("the events ended")
			}
			if x.Err == nil {
				return x
			}
		case <-timeout.C:
			t.Fatal("no event within 10 s")
		}
	}
}

// raiseUntilTold is for when the listener may not be listening yet.
func raiseUntilTold(t *testing.T, events <-chan gpu.Xid, uuid string, code int) {
	t.Helper()
	until(t, "an event of "+uuid, func() bool {
		if err := sim.Xid(uuid, uint64(code)); err != nil {
			t.Fatal(err)
		}
		select {
		case x := <-events:
			return x.Err == nil && x.UUID == uuid && x.Code == code
		default:
			return false
		}
	})
}

func TestGPUsComeAndGo(t *testing.T) {
	for _, variant := range []string{"", "count-fixed-at-init"} {
		t.Run("variant "+variant, func(t *testing.T) {
			spec := steer(t, func(s *nvmlsim.Spec) {
				if variant != "" {
					s.Variants = []string{variant}
				}
			})
			n := open(t, soon)
			events, err := n.Xids(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := sim.Update(func(s *nvmlsim.Spec) { s.GPUs = s.GPUs[1:] }); err != nil {
				t.Fatal(err)
			}
			until(t, "one is gone", func() bool {
				all, err := n.Devices(t.Context())
				return err == nil && len(all) == 2 && (errors.Is(all[0].Err, gpu.ErrLost) || errors.Is(all[1].Err, gpu.ErrLost))
			})
			fresh := spec.GPUs[0]
			fresh.UUID = "GPU-00000000-0000-4000-8000-00000000000f"
			if err := sim.Update(func(s *nvmlsim.Spec) { s.GPUs = append(s.GPUs, fresh) }); err != nil {
				t.Fatal(err)
			}
			until(t, "a new one is listed", func() bool {
				all, err := n.Devices(t.Context())
				return err == nil && len(all) == 3
			})
			raiseUntilTold(t, events, fresh.UUID, 63) // the listener takes it in at its next wait
		})
	}
}

func TestAGPULostFromTheStartHasNoName(t *testing.T) {
	spec := steer(t, func(s *nvmlsim.Spec) { s.GPUs[0].Lost = true })
	n := open(t, soon)
	inv, err := n.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(inv.Devices) != 1 || inv.Devices[0].UUID != spec.GPUs[1].UUID || len(inv.Unreadable) != 1 ||
		inv.Unreadable[0].Index != 0 || !errors.Is(inv.Unreadable[0].Err, gpu.ErrLost) {
		t.Errorf("%+v", inv)
	}
	if err := sim.Lose(spec.GPUs[0].UUID, false); err != nil {
		t.Fatal(err)
	}
	until(t, "it is there", func() bool {
		inv, err := n.Inventory(t.Context())
		return err == nil && len(inv.Devices) == 2 && len(inv.Unreadable) == 0
	})
}

func TestXids(t *testing.T) {
	spec := steer(t, func(*nvmlsim.Spec) {})
	one, other := spec.GPUs[0].UUID, spec.GPUs[1].UUID
	raise := func(uuid string, code uint64) {
		t.Helper()
		if err := sim.Xid(uuid, code); err != nil {
			t.Fatal(err)
		}
	}
	raise(one, 43) // before anybody listens
	n := open(t, time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	events, err := n.Xids(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Xids(ctx); err == nil {
		t.Error("a second listener was let in")
	}
	begin := time.Now()
	raise(one, 31)
	raise(other, 13)
	raise(one, 45)
	for _, want := range []gpu.Xid{{UUID: one, Code: 31}, {UUID: other, Code: 13}, {UUID: one, Code: 45}} {
		x := nextXid(t, events)
		if x.UUID != want.UUID || x.Code != want.Code || x.At.Before(begin) {
			t.Errorf("got %+v, want %+v", x, want)
		}
	}
	// The Xid of a GPU that falls off the bus comes from one that can no longer be asked for its UUID.
	if err := sim.Update(func(s *nvmlsim.Spec) {
		s.GPUs[0].Lost = true
		s.Xids = append(s.Xids, nvmlsim.Xid{Seq: s.Xids[len(s.Xids)-1].Seq + 1, UUID: one, Code: 79})
	}); err != nil {
		t.Fatal(err)
	}
	if x := nextXid(t, events); x.UUID != one || x.Code != 79 {
		t.Errorf("fallen off the bus: %+v", x)
	}
	cancel()
	for range events { // ends
	}
	again, err := n.Xids(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	raise(other, 48)
	if x := nextXid(t, again); x.UUID != other || x.Code != 48 {
		t.Errorf("the next listener: %+v", x)
	}
}

func TestListeningHasTrouble(t *testing.T) {
	spec := steer(t, func(*nvmlsim.Spec) {})
	n := open(t, soon)
	events, err := n.Xids(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Fail("EventSetWait", "", "UNKNOWN"); err != nil {
		t.Fatal(err)
	}
	if x := <-events; x.Err == nil || x.Err.Error() != "EventSetWait: Unknown Error" {
		t.Errorf("%+v", x)
	}
	if err := sim.Fail("EventSetWait", "", ""); err != nil {
		t.Fatal(err)
	}
	raiseUntilTold(t, events, spec.GPUs[1].UUID, 31)
	if err := sim.Hang("EventSetWait", true); err != nil {
		t.Fatal(err)
	}
	until(t, "the wait that hangs is told", func() bool {
		select {
		case x := <-events:
			return errors.Is(x.Err, gpu.ErrHung)
		default:
			return false
		}
	})
	if _, err := n.Sample(t.Context(), spec.GPUs[0].UUID); err != nil {
		t.Errorf("a sample while the events hang: %v", err)
	}
	if err := sim.Hang("EventSetWait", false); err != nil {
		t.Fatal(err)
	}
	until(t, "nothing hangs", func() bool { return len(n.Hung()) == 0 })
}
