package mps

import (
	"path/filepath"
	"time"
)

const (
	controlName   = "nvidia-cuda-mps-control"
	defaultPath   = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	defaultRunDir = "/run/berth"
	defaultLogDir = "/var/log/berth"
)

func (c Config) withDefaults() Config {
	text := func(field *string, value string) {
		if *field == "" {
			*field = value
		}
	}
	duration := func(field *time.Duration, value time.Duration) {
		if *field <= 0 {
			*field = value
		}
	}
	text(&c.RunDir, defaultRunDir)
	text(&c.LogDir, defaultLogDir)
	text(&c.ControlBinary, controlName)
	text(&c.Path, defaultPath)
	duration(&c.TickEvery, time.Second)
	duration(&c.ProbeEvery, 10*time.Second)
	duration(&c.ProbeTimeout, 2*time.Second)
	duration(&c.StartTimeout, 10*time.Second)
	duration(&c.ServerStartTimeout, 60*time.Second)
	duration(&c.StopTimeout, 5*time.Second)
	if c.LogLimitBytes <= 0 {
		c.LogLimitBytes = 8 << 20
	}
	if c.Budget.Failures <= 0 {
		c.Budget.Failures = 5
	}
	if c.Budget.Window <= 0 {
		c.Budget.Window = 10 * time.Minute
	}
	// The control binary may lie beside its server and outside of PATH.
	if control := FindControl(c.ControlBinary, c.Path); control != "" {
		c.ControlBinary = control
		if dir := filepath.Dir(control); dir != "" && c.Path == defaultPath {
			c.Path = dir + ":" + c.Path
		}
	} else {
		c.ControlBinary = ""
	}
	return c
}

// environment is the whole environment of the daemon and of the control utility,
// but for the folders: what the agent itself was started with must not decide
// which server binary and which driver library are found.
func (c Config) environment() []string {
	env := []string{"PATH=" + c.Path, "LANG=C"}
	if c.LibraryPath != "" {
		env = append(env, "LD_LIBRARY_PATH="+c.LibraryPath)
	}
	return env
}
