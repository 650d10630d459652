package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement"
	"github.com/berth-gpu/berth/placement/replace/dev"
)

// How long berth dev waits for its machines.
const (
	devLaunch = 2 * time.Minute // for one to be made and started
	devJoin   = time.Minute     // for all to have joined
	devEnd    = 2 * time.Minute // for one to be taken away
)

// sampleImage is what the task definitions of testdata run.
const sampleImage = "berth-sample:latest"

const devHelp = `A whole system with one command, on a machine without a GPU: a placement server
with its embedded store, and simulated machines, each an agent of its own. It needs root
and a Docker engine.

Ctrl-C takes all of it away again. When it ends otherwise (SIGTERM, SIGKILL), agents,
tasks and store stay, and the same command goes on with them.

Everything lies in --dir, sockets and MPS pipe folders in --run-dir. BERTH_PLACEMENT_*
in the environment set the server, --agent-setting the agents.`

// devSystem is what berth dev is told.
type devSystem struct {
	dir, runDir     string
	instances, gpus int
	gpuMemory       int64
	agentSettings   map[string]string
	down            bool
}

func (a *app) devCommand() *cobra.Command {
	d := devSystem{}
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a whole system on this machine: server, store and simulated GPU machines",
		Long:  devHelp,
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return a.dev(cmd.Context(), d) },
	}
	cmd.Flags().StringVar(&d.dir, "dir", "build/dev", "where everything lies")
	cmd.Flags().StringVar(&d.runDir, "run-dir", filepath.Dir(serverSocket), "sockets and MPS pipe folders; short, since a socket's path has at most 107 bytes")
	cmd.Flags().IntVar(&d.instances, "instances", 2, "machines to begin with")
	cmd.Flags().IntVar(&d.gpus, "gpus", 2, "GPUs of each machine")
	cmd.Flags().Int64Var(&d.gpuMemory, "gpu-memory", 81920, "memory of each GPU in MiB")
	cmd.Flags().StringToStringVar(&d.agentSettings, "agent-setting", nil, "a setting of the agents, as key=value (mps.drainDeadline=30s)")
	cmd.Flags().BoolVar(&d.down, "down", false, "only take away what an earlier one left")
	return cmd
}

// settings are the server's: those of the environment, and what dev decides.
func (d devSystem) settings() (*config.Server, error) {
	dir, err := filepath.Abs(d.dir)
	if err != nil {
		return nil, err
	}
	environ := append(os.Environ(),
		"BERTH_PLACEMENT_PROVIDER="+config.ProviderDev,
		"BERTH_PLACEMENT_DEV_DIR="+filepath.Join(dir, "machines"),
		fmt.Sprintf("BERTH_PLACEMENT_DEV_GPUS=%d", d.gpus),
		fmt.Sprintf("BERTH_PLACEMENT_DEV_GPU_MEMORY=%d", d.gpuMemory),
		"BERTH_PLACEMENT_DATA_DIR="+filepath.Join(dir, "server"),
		"BERTH_PLACEMENT_SOCKET="+filepath.Join(d.runDir, filepath.Base(serverSocket)),
		"BERTH_PLACEMENT_AGENTS_LISTEN=unix:"+filepath.Join(d.runDir, "agents.sock"))
	s, _, err := config.LoadServer("", environ)
	return s, err
}

// forAgents are the agents' settings, a number or a truth as such.
func (d devSystem) forAgents() map[string]any {
	out := map[string]any{}
	for key, text := range d.agentSettings {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			out[key] = n
		} else if b, err := strconv.ParseBool(text); err == nil {
			out[key] = b
		} else {
			out[key] = text
		}
	}
	return out
}

func (a *app) dev(ctx context.Context, d devSystem) error {
	if d.instances < 0 || d.instances > 100 {
		return usageError("--instances: %d is not within 0 and 100", d.instances)
	}
	if os.Geteuid() != 0 {
		return errors.New("berth dev needs root: its agents use Docker, device nodes and control groups; use sudo")
	}
	settings, err := d.settings()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return err
	}
	log, err := config.Logger(settings.LogLevel, filepath.Join(d.dir, "server.log"))
	if err != nil {
		return err
	}
	defer log.Sync()
	machines, err := openDev(settings, d.forAgents(), log)
	if err != nil {
		return err
	}
	if d.down {
		a.socket = settings.Socket
		if _, err := a.client().instances(ctx); err == nil {
			return fmt.Errorf("a server answers at %s: end its berth dev first (Ctrl-C there takes all away)", settings.Socket)
		}
		return a.devDown(d, machines)
	}
	server, err := placement.Open(ctx, settings, machines, version, log)
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ctx, over := context.WithCancelCause(ctx)
	defer over(nil)
	ended := make(chan error, 1)
	go func() {
		err := server.Run(running)
		over(errors.New("the server has ended")) // by itself, it may be: nothing is waited for then
		ended <- err
	}()
	a.socket = settings.Socket
	if err := a.devMachines(ctx, d, machines, log); err != nil && ctx.Err() == nil {
		stop()
		return errors.Join(err, <-ended)
	}
	if ctx.Err() == nil {
		fmt.Fprintf(a.out, "ready: berth ps, run, service, instances, top, drain, events... (socket %s, log %s/server.log)\n", settings.Socket, d.dir)
		fmt.Fprintln(a.out, "Ctrl-C takes all of it away")
	}
	<-ctx.Done()
	stop()
	if err := <-ended; err != nil {
		return err
	}
	if !interrupted(ctx) {
		fmt.Fprintln(a.out, "ended; agents and tasks go on, and berth dev goes on with them")
		return nil
	}
	return a.devDown(d, machines)
}

// devMachines starts the machines that do not run, and makes those that are missing.
func (a *app) devMachines(ctx context.Context, d devSystem, machines *dev.Provider, log *zap.Logger) error {
	bounded, cancel := context.WithTimeout(ctx, devLaunch)
	err := machines.LoadSample(bounded, sampleImage)
	cancel()
	if err != nil {
		return err
	}
	have, err := machines.List(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, m := range have {
		bounded, cancel := context.WithTimeout(ctx, devLaunch)
		_, err := machines.Start(bounded, m.ID)
		cancel()
		switch {
		case errors.Is(err, dev.ErrEnded) || errors.Is(err, fs.ErrNotExist):
			continue // it was being taken away when the last berth dev ended: the server goes on with that
		case err != nil && ctx.Err() == nil:
			// The others are not worse for it, and the server sees that it does not join.
			log.Error("cannot start a machine", zap.String("instance", m.ID), zap.Error(err))
			fmt.Fprintf(a.out, "%s does not start: %v\n", m.ID, err)
		}
		names = append(names, m.ID)
	}
	for len(names) < d.instances {
		bounded, cancel := context.WithTimeout(ctx, devLaunch)
		m, err := machines.Launch(bounded, rand.Text())
		cancel()
		if err != nil {
			return err
		}
		fmt.Fprintf(a.out, "%s: %d simulated GPUs of %d MiB\n", m.ID, d.gpus, d.gpuMemory)
		names = append(names, m.ID)
	}
	bounded, cancel = context.WithTimeout(ctx, devJoin)
	defer cancel()
	for {
		joined := 0
		if all, err := a.client().instances(bounded); err == nil {
			for _, in := range bare(all) {
				if in.Connected && in.Health.OverallStatus == api.HealthOK {
					joined++
				}
			}
		}
		if joined >= len(names) {
			return nil
		}
		select {
		case <-bounded.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			log.Warn("not all machines have joined", zap.Int("joined", joined), zap.Int("of", len(names)))
			fmt.Fprintf(a.out, "%d of %d machines have joined; %s/machines/*/agent.log say more\n", joined, len(names), d.dir)
			return nil
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// devDown takes every machine and the server's folder away.
func (a *app) devDown(d devSystem, machines *dev.Provider) error {
	ctx := context.Background() // each step has its limit; a second Ctrl-C does not cut it short
	have, err := machines.List(ctx)
	if err != nil {
		return err
	}
	var failed error
	for _, m := range have {
		fmt.Fprintf(a.out, "taking %s away: its tasks, MPS daemons and folders\n", m.ID)
		bounded, cancel := context.WithTimeout(ctx, devEnd)
		failed = errors.Join(failed, machines.Terminate(bounded, m.ID))
		cancel()
	}
	if failed != nil {
		return fmt.Errorf("%w; try again with berth dev --down --dir %s --run-dir %s", failed, d.dir, d.runDir)
	}
	for _, path := range []string{filepath.Join(d.dir, "server"), filepath.Join(d.dir, "machines")} {
		failed = errors.Join(failed, os.RemoveAll(path))
	}
	os.Remove(d.runDir) // where it is empty
	return failed
}

// interrupted says whether it was Ctrl-C that ended ctx.
func interrupted(ctx context.Context) bool {
	return strings.HasPrefix(context.Cause(ctx).Error(), os.Interrupt.String())
}
