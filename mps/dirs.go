package mps

import "path/filepath"

// Dirs are one GPU's folders and files.
type Dirs struct {
	Run, Log string // /run/berth and /var/log/berth
	UUID     string // of the GPU
}

// Pipe is the daemon's own folder; no container sees it.
func (d Dirs) Pipe() string { return filepath.Join(d.Run, "mps", d.UUID, "pipe") }

// Client is the folder that containers mount, read-only.
func (d Dirs) Client() string { return filepath.Join(d.Run, "mps", d.UUID, "client") }

// Logs is the folder of the daemon's log.
func (d Dirs) Logs() string { return filepath.Join(d.Log, "mps", d.UUID) }

// ControlLog is the daemon's and its servers' output, append-only.
func (d Dirs) ControlLog() string { return filepath.Join(d.Logs(), "control.log") }
