package agent

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/mps"
)

// Doctor looks at every precondition of the agent's work and says what it found
// and what to do. It changes nothing.
func (a *Agent) Doctor(ctx context.Context) []api.Check {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	checks := a.checkDriver(ctx)
	checks = append(checks, a.checkMPS(ctx)...)
	checks = append(checks, a.checkDocker(ctx)...)
	checks = append(checks, a.checkCgroup(), a.checkServer())
	return append(checks, a.checkFolders()...)
}

func (a *Agent) checkDriver(ctx context.Context) []api.Check {
	if a.nvml == nil {
		return []api.Check{{Name: "driver", Says: a.noNVML.Error(), Do: "install NVIDIA's driver, or name its libnvidia-ml.so.1 in gpu.nvmlLibrary; tasks without a GPU run all the same", Warn: true}}
	}
	devices, err := a.nvml.Devices(ctx)
	if err != nil {
		return []api.Check{{Name: "driver", Says: err.Error(), Do: "see dmesg for NVRM messages; a GPU that fell off the bus needs a reboot of the machine"}}
	}
	if len(devices) == 0 {
		return []api.Check{{Name: "driver", Says: "NVML finds no GPU", Do: "check lspci and dmesg", Warn: true}}
	}
	out := []api.Check{{Name: "driver", OK: true, Says: fmt.Sprintf("driver %s, %d GPUs", devices[0].DriverVersion, len(devices))}}
	for _, d := range devices {
		node := filepath.Join(a.settings.GPU.DevRoot, fmt.Sprintf("nvidia%d", d.Minor))
		if info, err := os.Stat(node); err != nil || info.Mode()&os.ModeCharDevice == 0 {
			out = append(out, api.Check{Name: "device " + node, Says: "it is not there, or not a character device", Do: "load the driver's nodes (nvidia-modprobe), or set gpu.devRoot"})
		}
	}
	return out
}

func (a *Agent) checkMPS(ctx context.Context) []api.Check {
	s := a.settings.MPS
	var out []api.Check
	control := mps.FindControl(s.ControlBinary, s.Path)
	if control == "" {
		out = append(out, api.Check{Name: "mps", Says: s.ControlBinary + " is not in " + s.Path, Do: "install it with the driver (Debian: nvidia-cuda-mps), or set mps.controlBinary; whole-GPU tasks run without", Warn: true})
	} else {
		out = append(out, api.Check{Name: "mps", OK: true, Says: control})
	}
	for _, g := range a.View().Instance.GPUs {
		c := api.Check{Name: fmt.Sprintf("mps GPU %d", g.Index), OK: true, Says: g.MPS.State}
		if g.MPS.Reason != "" {
			c.Says += ": " + g.MPS.Reason
		}
		switch mps.Phase(g.MPS.State) {
		case mps.PhaseUnsupported:
			c.OK, c.Warn, c.Do = false, true, "whole-GPU tasks run on it; for MPS tasks mend what is named"
		case mps.PhaseQuarantined:
			c.OK, c.Do = false, "mend the cause that is named, then restart the machine or `berth-agent purge`"
		case mps.PhaseDraining, mps.PhaseBackoff:
			c.OK, c.Do = false, "wait: the GPU opens again by itself once its tasks have ended"
		}
		out = append(out, c)
	}
	return append(out, checkConflicts(ctx)...)
}

// checkConflicts finds what else on this machine may want the same GPUs.
func checkConflicts(ctx context.Context) []api.Check {
	out := []api.Check{}
	for _, unit := range []string{"nvidia-mps.service", "nvidia-cuda-mps.service"} {
		word, _ := exec.CommandContext(ctx, "systemctl", "is-enabled", unit).Output() // its exit status only repeats the word
		if w := strings.TrimSpace(string(word)); w == "enabled" || w == "enabled-runtime" {
			out = append(out, api.Check{Name: "conflicts", Says: unit + " is " + w + ": its daemon would take the GPUs", Do: "systemctl disable --now " + unit})
		}
	}
	if pid := mps.LockHolder(defaultPipe); pid != 0 {
		out = append(out, api.Check{Name: "conflicts", Says: fmt.Sprintf("an MPS control daemon (pid %d) runs on %s, which the NVIDIA container runtime mounts into every GPU container", pid, defaultPipe),
			Do: "stop it: echo quit | nvidia-cuda-mps-control"})
	}
	if len(out) == 0 {
		out = append(out, api.Check{Name: "conflicts", OK: true, Says: "no other MPS daemon or service"})
	}
	return out
}

// defaultPipe is where a daemon listens that nobody told otherwise.
const defaultPipe = "/tmp/nvidia-mps"

func (a *Agent) checkDocker(ctx context.Context) []api.Check {
	info, err := a.docker.Info(ctx)
	if err != nil {
		return []api.Check{{Name: "docker", Says: err.Error(), Do: "start Docker; running containers are adopted again"}}
	}
	out := []api.Check{{Name: "docker", OK: true, Says: fmt.Sprintf("Docker %s, API %s, GPUs by %s", info.Version, info.API, a.runtime())}}
	if !info.LiveRestore {
		out = append(out, api.Check{Name: "docker live-restore", Warn: true, Says: "off: a restart of Docker ends every container", Do: `set "live-restore": true in /etc/docker/daemon.json`})
	}
	if a.runtime() == config.RuntimePlain && a.settings.GPU.DevRoot == "/dev" && len(a.units) > 0 {
		out = append(out, api.Check{Name: "docker runtime", Warn: true, Says: "neither the NVIDIA runtime nor CDI: containers get device nodes and must bring the driver's libraries themselves", Do: "install nvidia-container-toolkit"})
	}
	if info.UserNamespace {
		out = append(out, api.Check{Name: "docker userns-remap", OK: true, Says: "on: root in a container is not root to the MPS daemon"})
	}
	return out
}

func (a *Agent) checkCgroup() api.Check {
	driver, err := cgroup.ParseDriver(a.info.CgroupDriver, a.info.CgroupVersion)
	if err == nil {
		var says string
		if says, err = cgroup.Detect(driver); err == nil {
			return api.Check{Name: "cgroup", OK: true, Says: says}
		}
	}
	return api.Check{Name: "cgroup", Says: err.Error(), Do: "tasks cannot be given CPU and memory limits until this is mended"}
}

func (a *Agent) checkFolders() []api.Check {
	var out []api.Check
	s := a.settings
	for _, u := range a.units {
		if u.holder == nil {
			continue
		}
		if err := (mps.Dirs{Run: s.RunDir, Log: s.LogDir, UUID: u.dev.UUID}).Check(); err != nil {
			out = append(out, api.Check{Name: "folders", Says: err.Error(), Do: "mend it; the GPU's daemon is not started until then"})
			break
		}
	}
	for _, dir := range []string{s.RunDir, s.StateDir, s.LogDir} {
		if info, err := os.Stat(dir); err != nil {
			out = append(out, api.Check{Name: "folders", Says: err.Error(), Do: "make it: mkdir -p " + dir})
		} else if !info.IsDir() {
			out = append(out, api.Check{Name: "folders", Says: dir + " is not a folder", Do: "move it away"})
		}
	}
	if len(out) == 0 {
		out = append(out, api.Check{Name: "folders", OK: true, Says: strings.Join([]string{s.RunDir, s.StateDir, s.LogDir}, ", ")})
	}
	return out
}
