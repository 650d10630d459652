package gpu

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The story of a lane: busy, hung, back.
func TestLane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, inUse := newLane(), &sync.RWMutex{}
		ask := func(call func() (int, error)) (int, error) {
			return run(t.Context(), l, inUse, "GPU-1", "Ask", time.Second, call)
		}
		if v, err := ask(func() (int, error) { return 7, nil }); v != 7 || err != nil {
			t.Errorf("an idle lane: %d, %v", v, err)
		}
		failed := errors.New("failed")
		if _, err := ask(func() (int, error) { return 0, failed }); err != failed {
			t.Errorf("a call that fails: %v", err)
		}

		comeBack, begin, inside := make(chan struct{}), time.Now(), 0
		hang := func() (int, error) { inside++; <-comeBack; return 0, nil }
		var first, second sync.WaitGroup
		first.Go(func() {
			if _, err := ask(hang); !errors.Is(err, ErrHung) || time.Since(begin) != time.Second {
				t.Errorf("the call that hangs: %v after %s", err, time.Since(begin))
			}
		})
		synctest.Wait()
		if h := l.hung(); h != nil {
			t.Errorf("before its limit: %v", h)
		}
		second.Go(func() {
			if _, err := ask(hang); !errors.Is(err, ErrHung) || time.Since(begin) != time.Second {
				t.Errorf("one that waited for it: %v after %s", err, time.Since(begin))
			}
		})
		first.Wait()
		second.Wait()
		want := &HungError{UUID: "GPU-1", Call: "Ask", Since: begin}
		if h := l.hung(); !reflect.DeepEqual(h, want) {
			t.Errorf("hung: %v, want %v", h, want)
		}
		now := time.Now()
		for range 10 {
			if _, err := ask(hang); !reflect.DeepEqual(err, error(want)) || time.Since(now) != 0 {
				t.Errorf("while it hangs: %v after %s", err, time.Since(now))
			}
		}
		if inside != 1 {
			t.Errorf("%d calls went inside, want 1", inside)
		}
		if inUse.TryLock() {
			t.Error("NVML looks unused while a call hangs")
		}
		close(comeBack)
		synctest.Wait()
		if v, err := ask(func() (int, error) { return 8, nil }); v != 8 || err != nil || l.hung() != nil {
			t.Errorf("after it came back: %d, %v", v, err)
		}
	})
}

func TestLaneGivesUpWithItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, inUse := newLane(), &sync.RWMutex{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		slow := func() (int, error) { time.Sleep(30 * time.Second); return 1, nil } // in the bubble's time
		if _, err := run(ctx, l, inUse, "", "Slow", time.Minute, slow); err != context.DeadlineExceeded {
			t.Errorf("given up inside: %v", err)
		}
		if _, err := run(ctx, l, inUse, "", "Slow", time.Minute, slow); err != context.DeadlineExceeded {
			t.Errorf("given up before: %v", err)
		}
		begin := time.Now()
		if v, err := run(t.Context(), l, inUse, "", "Slow", time.Minute, slow); v != 1 || err != nil || time.Since(begin) != 59*time.Second {
			t.Errorf("after the one inside, which nobody waits for: %d, %v, %s", v, err, time.Since(begin))
		}
	})
}

func TestBranch(t *testing.T) {
	for _, c := range []struct {
		version string
		want    int
		err     string
	}{
		{"580.159.03", 580, ""},
		{"535.261.03", 535, ""},
		{"610", 610, ""},
		{"", 0, `driver version "": does not begin with a branch number`},
		{"R580", 0, `driver version "R580": does not begin with a branch number`},
		{"-1.2", 0, `driver version "-1.2": does not begin with a branch number`},
		{"+580.1", 0, `driver version "+580.1": does not begin with a branch number`},
		{"0.1", 0, `driver version "0.1": does not begin with a branch number`},
	} {
		got, err := Branch(c.version)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%q: %d, %v", c.version, got, err)
		}
	}
}

func TestMiBAreRoundedUp(t *testing.T) {
	for bytes, want := range map[uint64]int64{0: 0, 1: 1, mib - 1: 1, mib: 1, mib + 1: 2, 1<<64 - 1: 1 << 44} {
		if got := mibUp(bytes); got != want {
			t.Errorf("%d bytes are %d MiB, want %d", bytes, got, want)
		}
	}
}

func TestErrorsByClass(t *testing.T) {
	for ret, want := range map[nvml.Return]error{
		nvml.ERROR_GPU_IS_LOST:        ErrLost,
		nvml.ERROR_RESET_REQUIRED:     ErrLost,
		nvml.ERROR_NOT_FOUND:          ErrUnknownGPU,
		nvml.ERROR_NOT_SUPPORTED:      ErrNotSupported,
		nvml.ERROR_FUNCTION_NOT_FOUND: ErrNotSupported,
		nvml.ERROR_NO_PERMISSION:      ErrNoPermission,
		nvml.ERROR_DRIVER_NOT_LOADED:  ErrNoDriver,
		nvml.ERROR_UNINITIALIZED:      ErrNoDriver,
	} {
		if err := callError("Call", "GPU-1", ret); !errors.Is(err, want) {
			t.Errorf("%d: %v, want %v", ret, err, want)
		}
	}
	if err := callError("Call", "GPU-1", nvml.SUCCESS); err != nil {
		t.Errorf("success: %v", err)
	}
}
