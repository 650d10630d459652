package main

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

func (a *app) instancesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "instances",
		Short: "Show the machine, its GPUs and its health",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			inst, raw, err := a.client().instance(cmd.Context())
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(raw)
			}
			a.printInstance(inst)
			return nil
		},
	}
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
			fmt.Fprintf(a.out, "%s %s for %s: %s\n", d.Type, d.Status, age(a.now(), d.LastStatusChange), dash(d.StatusReason))
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

// whyNotHeld is the gate's reason, or the supervisor's where the gate has none.
func whyNotHeld(g api.GPU) string {
	if g.Held {
		return ""
	}
	if g.HeldReason != "" {
		return g.HeldReason
	}
	return g.MPS.Reason
}
