package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement"
	"github.com/berth-gpu/berth/placement/replace/dev"
)

func (a *app) serverCommand() *cobra.Command {
	var path, dataDir string
	var endpoints []string
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Run a placement server until SIGTERM or SIGINT; agents and tasks go on without it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var environ []string
			if dataDir != "" {
				environ = append(environ, "BERTH_PLACEMENT_DATA_DIR="+dataDir)
			}
			for i, e := range endpoints {
				if i == 0 {
					environ = append(environ, "BERTH_PLACEMENT_ETCD_ENDPOINTS="+e)
				} else {
					environ[len(environ)-1] += "," + e
				}
			}
			settings, warnings, err := config.LoadServer(path, append(os.Environ(), environ...))
			if err != nil {
				return err
			}
			log, err := config.Logger(settings.LogLevel, "")
			if err != nil {
				return err
			}
			defer log.Sync()
			for _, w := range warnings {
				log.Warn("setting not honoured", zap.String("name", w.Name), zap.String("says", w.Says))
			}
			machines, err := openDev(settings, nil, log)
			if err != nil {
				return err
			}
			s, err := placement.Open(cmd.Context(), settings, machines, version, log)
			if err != nil {
				return err
			}
			log.Info("berth server", zap.String("version", version), zap.String("cluster", settings.Cluster), zap.String("socket", settings.Socket),
				zap.String("agents", settings.Agents.Listen), zap.String("dataDir", settings.DataDir), zap.Strings("etcd", settings.Etcd.Endpoints))
			return s.Run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&path, "config", "", "settings file; BERTH_PLACEMENT_* in the environment go over it")
	cmd.Flags().StringVar(&dataDir, "data-dir", "", "where the embedded store and the flight recorder are (dataDir)")
	cmd.Flags().StringSliceVar(&endpoints, "etcd-endpoints", nil, "an outside etcd cluster instead of the embedded one (etcd.endpoints)")
	return cmd
}

// openDev opens the provider of simulated machines, or none.
func openDev(s *config.Server, agentSettings map[string]any, log *zap.Logger) (*dev.Provider, error) {
	if s.Provider != config.ProviderDev {
		return nil, nil
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	agent := filepath.Join(filepath.Dir(exe), "berth-agent")
	if _, err := os.Stat(agent); err != nil {
		return nil, fmt.Errorf("provider dev starts berth-agent, which is not beside berth: %w (make build makes both)", err)
	}
	return dev.Open(dev.Options{Dir: s.Dev.Dir, RunDir: filepath.Dir(s.Socket), Berth: exe, Agent: agent, GPUs: s.Dev.GPUs, GPUMemoryMiB: s.Dev.GPUMemoryMiB,
		Server: s.Agents.Listen, Cluster: s.Cluster, Settings: agentSettings, Log: log})
}
