// Command berth-agent is the service on a GPU machine: it holds the GPUs through
// NVIDIA MPS and runs the tasks that a placement server orders, or without one those
// whose definitions lie in its task folder.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/agent/stream"
	"github.com/berth-gpu/berth/config"
)

// version is set by the linker.
var version = "dev"

func main() {
	// SIGTERM and SIGINT end the agent alone: containers and daemons go on.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := root().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "berth-agent:", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	cmd := &cobra.Command{Use: "berth-agent", Short: "Hold this machine's GPUs through MPS and run tasks on slices of them",
		SilenceUsage: true, SilenceErrors: true}
	cmd.PersistentFlags().String("config", "", "settings file; BERTH_* and ECS_* in the environment go over it")
	cmd.AddCommand(runCommand(), purgeCommand(), imageCommand(), &cobra.Command{Use: "version", Short: "Print the version",
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "berth-agent", version) }})
	return cmd
}

func runCommand() *cobra.Command {
	return &cobra.Command{Use: "run", Short: "Run the agent until SIGTERM or SIGINT; tasks and daemons go on without it", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withAgent(cmd, func(ctx context.Context, a *agent.Agent, s *config.Agent, log *zap.Logger) error {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				source := make(chan error, 1)
				go func() { source <- watchSource(ctx, a, s, log) }()
				err := a.Run(ctx)
				cancel()
				if ended := <-source; err == nil && !errors.Is(ended, context.Canceled) {
					err = ended
				}
				return err
			})
		}}
}

// watchSource keeps the agent's wanted tasks those of its one source.
func watchSource(ctx context.Context, a *agent.Agent, s *config.Agent, log *zap.Logger) error {
	if len(s.Server.Address) == 0 {
		return watchFolder(ctx, a, s.TaskDir, log)
	}
	if ignored, _ := filepath.Glob(filepath.Join(s.TaskDir, "*.json")); len(ignored) > 0 {
		log.Warn("files of the task folder are not read: server.address names a placement server, which says what is wanted here", zap.Strings("files", ignored))
	}
	return stream.Run(ctx, a, s, version, log)
}

func purgeCommand() *cobra.Command {
	return &cobra.Command{Use: "purge", Short: "Stop this agent's tasks and MPS daemons and remove all that it made; the agent must not run", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withAgent(cmd, func(ctx context.Context, a *agent.Agent, _ *config.Agent, _ *zap.Logger) error {
				return a.Purge(ctx, func(format string, args ...any) { fmt.Fprintf(cmd.OutOrStdout(), format+"\n", args...) })
			})
		}}
}

// withAgent loads the settings, opens the agent and hands both over.
func withAgent(cmd *cobra.Command, do func(context.Context, *agent.Agent, *config.Agent, *zap.Logger) error) error {
	settings, log, err := load(cmd)
	if err != nil {
		return err
	}
	defer log.Sync()
	if os.Geteuid() != 0 {
		return errors.New("berth-agent needs root: it makes device nodes available, sets compute modes and writes control groups; use sudo")
	}
	a, err := agent.Open(cmd.Context(), settings, version, log)
	if err != nil {
		return err
	}
	return do(cmd.Context(), a, settings, log)
}

func load(cmd *cobra.Command) (*config.Agent, *zap.Logger, error) {
	path, _ := cmd.Flags().GetString("config")
	settings, warnings, err := config.Load(path, os.Environ())
	if err != nil {
		return nil, nil, err
	}
	log, err := config.Logger(settings.LogLevel, "")
	if err != nil {
		return nil, nil, err
	}
	for _, w := range warnings {
		log.Warn("setting not honoured", zap.String("name", w.Name), zap.String("says", w.Says))
	}
	return settings, log, nil
}
