package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

// completeWithin bounds what a press of the Tab key waits for.
const completeWithin = time.Second

// completing makes names, which asks at the socket, into a completion: bounded in time
// and silent when it fails, since the shell's line is no place for an error.
func (a *app) completing(names func(context.Context, *client, string) []cobra.Completion) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
		ctx := cmd.Context()
		if ctx == nil {
			ctx = context.Background()
		}
		ctx, cancel := context.WithTimeout(ctx, completeWithin)
		defer cancel()
		if len(args) > 0 && cmd.Name() != "stop" {
			return nil, cobra.ShellCompDirectiveNoFileComp // all but stop take one
		}
		fits := slices.DeleteFunc(names(ctx, a.client(), word), func(name string) bool { return !strings.HasPrefix(name, word) })
		return fits, cobra.ShellCompDirectiveNoFileComp
	}
}

// taskIDs offers what is not stopped, by short ids while the word is short.
func (a *app) taskIDs(ctx context.Context, c *client, word string) []cobra.Completion {
	tasks, err := c.tasks(ctx, taskFilter{})
	if err != nil {
		return nil
	}
	var ids []cobra.Completion
	for _, t := range bare(tasks) {
		if t.LastStatus != api.StatusStopped {
			ids = append(ids, cobra.CompletionWithDesc(idFor(t.ID, word), nameOf(t)+" "+t.LastStatus))
		}
	}
	return ids
}

func idFor(id, word string) string {
	if len(word) > shortIDLength {
		return id
	}
	return shortID(id)
}

// logTargets offers tasks, stopped ones too, and each container where there are several.
func (a *app) logTargets(ctx context.Context, c *client, word string) []cobra.Completion {
	tasks, err := c.tasks(ctx, taskFilter{})
	if err != nil {
		return nil
	}
	var out []cobra.Completion
	for _, t := range bare(tasks) {
		desc := nameOf(t) + " " + t.LastStatus
		if len(t.Containers) < 2 {
			out = append(out, cobra.CompletionWithDesc(idFor(t.ID, word), desc))
			continue
		}
		for _, container := range t.Containers {
			id := shortID(t.ID)
			if len(word) > shortIDLength && word[shortIDLength] != '/' {
				id = t.ID
			}
			out = append(out, cobra.CompletionWithDesc(id+"/"+container.Name, desc))
		}
	}
	return out
}

func (a *app) instanceNames(ctx context.Context, c *client, _ string) []cobra.Completion {
	insts, err := c.instances(ctx)
	if err != nil {
		return nil
	}
	var names []cobra.Completion
	for _, inst := range bare(insts) {
		names = append(names, cobra.CompletionWithDesc(inst.Name, inst.Status+" "+inst.Health.OverallStatus))
	}
	slices.Sort(names)
	return names
}

func (a *app) serviceNames(ctx context.Context, c *client, _ string) []cobra.Completion {
	services, err := list[api.Service](ctx, c, api.PathServices, nil, nil)
	if err != nil {
		return nil
	}
	var names []cobra.Completion
	for _, s := range bare(services) {
		names = append(names, cobra.CompletionWithDesc(s.Name, s.TaskDefinition))
	}
	slices.Sort(names)
	return names
}
