package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// defaultMachine is where make run puts its simulated machine.
const defaultMachine = "build/machine"

// target is one GPU of a simulated machine, as the flags name it.
type target struct {
	dir, gpu string
}

// done is what a fault did, for -o json.
type done struct {
	Fault   string `json:"fault"`
	Machine string `json:"machine"`
	GPU     string `json:"gpu"`
	PIDs    []int  `json:"pids,omitempty"`
}

func (a *app) faultCommand() *cobra.Command {
	var t target
	cmd := &cobra.Command{
		Use:   "fault",
		Short: "Make a simulated machine fail: a daemon, a server, a client, a GPU, NVML",
		Long: `fault makes one GPU of a simulated machine fail while berth runs on it, as hardware,
drivers and processes fail in life. It works on the machine's folder, not through the
agent, and knows no way to touch a real GPU.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError("name a fault; berth fault --help lists them")
		},
	}
	cmd.PersistentFlags().StringVar(&t.dir, "machine", defaultMachine, "the simulated machine's folder")
	cmd.PersistentFlags().StringVar(&t.gpu, "gpu", "", "the GPU's index or UUID (needed where there are several)")

	signal := func(use, short string, do func(dir, uuid string) ([]int, error)) {
		cmd.AddCommand(&cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			m, uuid, err := t.find()
			if err != nil {
				return err
			}
			pids, err := do(m.Dir, uuid)
			if err != nil {
				return err
			}
			return a.printFault(done{Fault: cmd.Name(), Machine: m.Dir, GPU: uuid, PIDs: pids})
		}})
	}
	signal("kill-daemon", "kill -9 the MPS control daemon", mpssim.KillDaemon)
	signal("freeze-daemon", "stop (SIGSTOP) the MPS control daemon", mpssim.FreezeDaemon)
	signal("thaw-daemon", "let a frozen MPS control daemon go on", mpssim.ThawDaemon)
	signal("crash-server", "kill -9 the MPS server", mpssim.CrashServer)

	steer := func(use, short string, args cobra.PositionalArgs, do func(m *nvmlsim.Machine, uuid string, args []string) error) {
		cmd.AddCommand(&cobra.Command{Use: use, Short: short, Args: args, RunE: func(cmd *cobra.Command, args []string) error {
			m, uuid, err := t.find()
			if err != nil {
				return err
			}
			if err := do(m, uuid, args); err != nil {
				return err
			}
			return a.printFault(done{Fault: strings.Join(append([]string{cmd.Name()}, args...), " "), Machine: m.Dir, GPU: uuid})
		}})
	}
	steer("client-fault [CODE]", "a fatal fault of one CUDA client, which reaches every client of the GPU (CODE: the CUDA error, 700)", cobra.MaximumNArgs(1),
		func(m *nvmlsim.Machine, uuid string, args []string) error {
			code, err := number("CODE", args, 700)
			if err == nil {
				_, err = mpssim.FatalFault(m.Dir, uuid, int(code))
			}
			return err
		})
	steer("xid N", "an Xid event, which NVML reports", cobra.ExactArgs(1), func(m *nvmlsim.Machine, uuid string, args []string) error {
		code, err := number("N", args, 0)
		if err != nil {
			return err
		}
		return m.Xid(uuid, code)
	})
	steer("lose-gpu", "the GPU falls off the bus", cobra.NoArgs, func(m *nvmlsim.Machine, uuid string, _ []string) error { return m.Lose(uuid, true) })
	steer("restore-gpu", "a lost GPU comes back", cobra.NoArgs, func(m *nvmlsim.Machine, uuid string, _ []string) error { return m.Lose(uuid, false) })
	steer("nvml-hang", "NVML's calls about the GPU do not return", cobra.NoArgs, func(m *nvmlsim.Machine, uuid string, _ []string) error { return m.HangOn("*", uuid, true) })
	steer("nvml-unhang", "they return again", cobra.NoArgs, func(m *nvmlsim.Machine, uuid string, _ []string) error { return m.HangOn("*", uuid, false) })
	return cmd
}

func (a *app) printFault(d done) error {
	if a.json() {
		return a.printJSON(d)
	}
	fmt.Fprintf(a.out, "%s on %s", d.Fault, d.GPU)
	if len(d.PIDs) > 0 {
		fmt.Fprintf(a.out, " (pid %s)", strings.Trim(fmt.Sprint(d.PIDs), "[]"))
	}
	fmt.Fprintln(a.out)
	return nil
}

// find opens the machine and picks the GPU that --gpu means.
func (t target) find() (*nvmlsim.Machine, string, error) {
	m, err := nvmlsim.Open(t.dir)
	if err != nil {
		return nil, "", fmt.Errorf("--machine: %w. A simulated machine is made by make run, or berth sim create DIR", err)
	}
	spec, err := m.Spec()
	if err != nil {
		return nil, "", err
	}
	var all []string
	for i, g := range spec.GPUs {
		if t.gpu == g.UUID || t.gpu == strconv.Itoa(i) {
			return m, g.UUID, nil
		}
		all = append(all, fmt.Sprintf("%d (%s)", i, g.UUID))
	}
	switch {
	case len(all) == 0:
		return nil, "", errors.New("the machine has no GPU")
	case t.gpu == "" && len(all) == 1:
		return m, spec.GPUs[0].UUID, nil
	case t.gpu == "":
		return nil, "", usageError("--gpu: give one of %s", strings.Join(all, ", "))
	}
	return nil, "", usageError("--gpu: no GPU %q on the machine; it has %s", t.gpu, strings.Join(all, ", "))
}

// number parses the only argument; where there is none it is otherwise.
func number(name string, args []string, otherwise uint64) (uint64, error) {
	if len(args) == 0 {
		return otherwise, nil
	}
	n, err := strconv.ParseUint(args[0], 10, 31)
	if err != nil {
		return 0, usageError("%s: %q is no number of 0 to 2147483647", name, args[0])
	}
	return n, nil
}
