package main

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

func (a *app) instancesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "instances [NAME]",
		Short: "List the machines, or show one, its GPUs and its health",
		Long: `instances lists the machines that a server knows. Of one, named or the only one there is,
it shows each GPU and what is wrong.`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completing(a.instanceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			insts, err := a.someInstances(cmd, args)
			switch {
			case err != nil:
				return err
			case a.json():
				return a.printJSON(insts)
			case len(insts) == 1:
				a.printInstance(insts[0].is)
			default:
				a.printInstances(bare(insts))
			}
			return nil
		},
	}
}

// someInstances are all machines, or the one that the argument names.
func (a *app) someInstances(cmd *cobra.Command, args []string) ([]kept[api.Instance], error) {
	if len(args) == 0 {
		return a.client().instances(cmd.Context())
	}
	return a.client().instance(cmd.Context(), args[0])
}

// printInstances is a line per machine, and below what is wrong with any.
func (a *app) printInstances(insts []api.Instance) {
	if len(insts) == 0 {
		fmt.Fprintln(a.out, "no machine has joined; an agent joins with server.address set to this server's")
		return
	}
	rows := [][]string{{"NAME", "STATUS", "AGENT", "HEALTH", "GPUS", "GPU MEMORY FREE", "VCPU FREE", "MEMORY FREE", "VERSION", "UP"}}
	var wrong []string
	for _, inst := range insts {
		usable, free, total := capacity(inst)
		rows = append(rows, []string{inst.Name, inst.Status, connection(inst), inst.Health.OverallStatus, fmt.Sprintf("%d of %d", usable, len(inst.GPUs)),
			gib(free) + " of " + gib(total) + " GiB", vcpu(inst.Remaining.CPU) + " of " + vcpu(inst.Registered.CPU),
			gib(inst.Remaining.MemoryMiB) + " of " + gib(inst.Registered.MemoryMiB) + " GiB", dash(inst.Version), age(a.now(), inst.StartedAt)})
		for _, d := range inst.Health.Details {
			if d.Status != api.HealthOK {
				wrong = append(wrong, fmt.Sprintf("%s: %s", inst.Name, a.unhealthy(d)))
			}
		}
	}
	a.table(rows)
	if len(wrong) > 0 {
		fmt.Fprintln(a.out)
	}
	for _, line := range append(wrong, waitingLines(insts...)...) {
		fmt.Fprintln(a.out, line)
	}
}

// capacity is how many GPUs a task may be placed on now, and of all their memory (MiB)
// how much is free there.
func capacity(inst api.Instance) (usable int, free, total int64) {
	takes := inst.Connected && inst.Status == api.InstanceActive
	for _, g := range inst.GPUs {
		total += g.TotalMemoryInMiB
		if takes && isOpen(g) {
			usable++
			free += g.RemainingMemoryInMiB
		}
	}
	return usable, free, total
}

// isOpen says whether tasks may start on g. An older agent has no standing to say.
func isOpen(g api.GPU) bool {
	return g.Standing == api.GPUOpen || g.Standing == "" && (g.Held || g.SharingMode != api.ModeNvidiaMPS)
}

func connection(inst api.Instance) string {
	if inst.Connected {
		return "connected"
	}
	return "cut off"
}

func (a *app) unhealthy(d api.HealthDetail) string {
	return fmt.Sprintf("%s %s for %s: %s", d.Type, d.Status, age(a.now(), d.LastStatusChange), dash(d.StatusReason))
}

func (a *app) printInstance(inst api.Instance) {
	rows := [][]string{
		{"NAME", "CLUSTER", "STATUS", "HEALTH", "VCPU FREE", "MEMORY FREE", "DRIVER", "AGENT", "UP"},
		{inst.Name, inst.Cluster, inst.Status, inst.Health.OverallStatus,
			vcpu(inst.Remaining.CPU) + " of " + vcpu(inst.Registered.CPU),
			gib(inst.Remaining.MemoryMiB) + " of " + gib(inst.Registered.MemoryMiB) + " GiB",
			dash(inst.DriverVersion), inst.Version, age(a.now(), inst.StartedAt)},
	}
	if inst.EC2InstanceID != "" {
		rows[0] = append(rows[0], "EC2")
		rows[1] = append(rows[1], inst.EC2InstanceID)
	}
	a.table(rows)
	fmt.Fprintln(a.out)

	gpus := [][]string{{"GPU", "ID", "NAME", "MODE", "MPS", "FREE", "CONTAINERS", "RESTARTS", "FAILURES", "WHY"}}
	for _, g := range inst.GPUs {
		gpus = append(gpus, []string{strconv.Itoa(g.Index), g.ID, g.Name, g.SharingMode, holding(g),
			gib(g.RemainingMemoryInMiB) + " of " + gib(g.TotalMemoryInMiB) + " GiB", strconv.Itoa(g.ContainerCount),
			strconv.Itoa(g.MPS.Restarts), fmt.Sprintf("%d of %d", g.MPS.Failures, g.MPS.Budget), whyNotHeld(g)})
	}
	if len(inst.GPUs) == 0 {
		fmt.Fprintln(a.out, "no GPU; berth doctor says what the agent looked for")
	} else {
		a.table(gpus)
	}
	for _, d := range inst.Health.Details {
		if d.Status != api.HealthOK {
			fmt.Fprintln(a.out, a.unhealthy(d))
		}
	}
	for _, line := range waitingLines(inst) {
		fmt.Fprintln(a.out, line)
	}
}

// holding is the supervisor's state in one word: HELD when capped containers may
// start.
func holding(g api.GPU) string {
	switch {
	case g.Held:
		return "HELD"
	case g.MPS.State == "" || g.MPS.State == "HELD": // held by the supervisor, closed by the gate
		return "CLOSED"
	}
	return g.MPS.State
}

// whyNotHeld is the gate's reason, or the supervisor's where the gate has none, or why
// placement leaves the GPU alone all the same.
func whyNotHeld(g api.GPU) string {
	for _, why := range []string{g.HeldReason, g.MPS.Reason} {
		if !g.Held && why != "" && why != holding(g) { // IDLE says all
			return why
		}
	}
	return g.StandingReason
}
