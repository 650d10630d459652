package nvmlsim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine is a simulated machine's folder. Its methods may be called from any
// goroutine and any process; the last writer of a thing wins.
type Machine struct {
	Dir string // absolute
}

// Library is the path of the machine's libnvidia-ml.so.1.
func (m *Machine) Library() string { return filepath.Join(m.Dir, "lib", "libnvidia-ml.so.1") }

// LibraryPath is the folder of Library, for LD_LIBRARY_PATH.
func (m *Machine) LibraryPath() string { return filepath.Join(m.Dir, "lib") }

// Bin is the folder for the machine's MPS binaries.
func (m *Machine) Bin() string { return filepath.Join(m.Dir, "bin") }

// Dev is the folder of the machine's device nodes.
func (m *Machine) Dev() string { return filepath.Join(m.Dir, "dev") }

// Sim is the folder of the steer files.
func (m *Machine) Sim() string { return filepath.Join(m.Dir, "sim") }

// Open returns the machine in dir, which Create made.
func Open(dir string) (*Machine, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	m := &Machine{Dir: dir}
	_, err = m.Spec()
	return m, err
}

// Spec reads what the machine's steer file says now.
func (m *Machine) Spec() (Spec, error) { return ReadSpec(m.Dir) }

// Update changes the steer file. Updates from several processes follow one another.
func (m *Machine) Update(change func(*Spec)) error {
	return m.update(func(s *Spec) error { change(s); return nil })
}

func (m *Machine) update(change func(*Spec) error) error {
	lock, err := os.OpenFile(filepath.Join(m.Sim(), "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	s, err := m.Spec()
	if err != nil {
		return err
	}
	if err := change(&s); err != nil {
		return err
	}
	if err := s.validate(); err != nil {
		return err
	}
	return replace(filepath.Join(m.Sim(), "machine"), s.Format())
}

// onGPU changes one GPU's lines.
func (m *Machine) onGPU(uuid string, change func(*GPU)) error {
	return m.update(func(s *Spec) error {
		g := s.GPU(uuid)
		if g == nil {
			return fmt.Errorf("no gpu %s on the machine in %s", uuid, m.Dir)
		}
		change(g)
		return nil
	})
}

// Xid raises a critical event on a GPU. Of old events the file keeps 64.
func (m *Machine) Xid(uuid string, code uint64) error {
	return m.update(func(s *Spec) error {
		if s.GPU(uuid) == nil {
			return fmt.Errorf("no gpu %s on the machine in %s", uuid, m.Dir)
		}
		next := uint64(1)
		if n := len(s.Xids); n > 0 {
			next = s.Xids[n-1].Seq + 1
		}
		s.Xids = append(s.Xids, Xid{Seq: next, UUID: uuid, Code: code})
		if n := len(s.Xids); n > 64 {
			s.Xids = s.Xids[n-64:]
		}
		return nil
	})
}

// Lose makes a GPU fall off the bus, or come back.
func (m *Machine) Lose(uuid string, lost bool) error {
	return m.onGPU(uuid, func(g *GPU) { g.Lost = lost })
}

// Hang makes an NVML call never return, on every device, until it is switched off.
// call is as in Fault.
func (m *Machine) Hang(call string, on bool) error { return m.HangOn(call, "", on) }

// HangOn is Hang for one GPU.
func (m *Machine) HangOn(call, uuid string, on bool) error {
	return m.fault(Fault{Call: call, UUID: uuid, Hang: true}, on)
}

// Fail makes an NVML call return NVML_ERROR_<name>; name "" makes it work again.
// uuid "" is every device.
func (m *Machine) Fail(call, uuid, name string) error {
	return m.fault(Fault{Call: call, UUID: uuid, Error: name}, name != "")
}

func (m *Machine) fault(f Fault, on bool) error {
	return m.Update(func(s *Spec) {
		kept := s.Faults[:0]
		for _, old := range s.Faults {
			if old.Call != f.Call || old.UUID != f.UUID || old.Hang != f.Hang {
				kept = append(kept, old)
			}
		}
		if on {
			kept = append(kept, f)
		}
		s.Faults = kept
	})
}

// SetVGPU makes a GPU a vGPU slice, or bare metal again.
func (m *Machine) SetVGPU(uuid string, on bool) error {
	return m.onGPU(uuid, func(g *GPU) {
		g.Virtualization = 0
		if on {
			g.Virtualization = 2
		}
	})
}

// SetUtilization sets what utilisation a GPU shows while a process holds it, in percent.
func (m *Machine) SetUtilization(uuid string, gpu, memory int) error {
	return m.onGPU(uuid, func(g *GPU) { g.GPUPercent, g.MemoryPercent = gpu, memory })
}

// SetVariant switches a behaviour's second variant; names are in Behaviours.
func (m *Machine) SetVariant(name string, on bool) error {
	if !knownVariant(name) {
		return fmt.Errorf("variant %q: not in nvmlsim.Behaviours", name)
	}
	return m.Update(func(s *Spec) {
		kept := s.Variants[:0]
		for _, v := range s.Variants {
			if v != name {
				kept = append(kept, v)
			}
		}
		if on {
			kept = append(kept, name)
		}
		s.Variants = kept
	})
}

// ComputeMode is NVML's number of a GPU's mode: 0 DEFAULT, 2 PROHIBITED, 3 EXCLUSIVE_PROCESS.
func (m *Machine) ComputeMode(uuid string) (int, error) {
	text, err := os.ReadFile(filepath.Join(m.Sim(), "mode."+uuid))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// SetComputeMode sets a GPU's mode as a stranger with nvidia-smi would.
func (m *Machine) SetComputeMode(uuid string, mode int) error {
	return replace(filepath.Join(m.Sim(), "mode."+uuid), []byte(strconv.Itoa(mode)))
}

// Remove deletes the machine's folder. Processes that use it are not touched.
func (m *Machine) Remove() error { return os.RemoveAll(m.Dir) }

// replace puts a file in place by rename, so that a reader sees the old or the new one.
func replace(path string, content []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
