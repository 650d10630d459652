// Package cgroup owns the control group of each task: the parent of the task's
// containers, which holds the limits that the task has as a whole (CPU quota,
// memory, processes). Docker's own groups of the containers lie in it.
//
// Both versions of cgroups are spoken, each as the engine's driver names groups:
//
//	cgroupfs  /berth/<instance>/<task>                            in every v1 hierarchy, or in the one of v2
//	systemd   berth-<instance>-<task>.slice                       made through systemd's D-Bus
//	          (/berth.slice/berth-<instance>.slice/berth-<instance>-<task>.slice)
//
// The kernel holds all state: a Tree has none, may be used by several
// goroutines for different tasks, and finds after a crash what was there before.
// A group is only ever removed empty.
package cgroup
