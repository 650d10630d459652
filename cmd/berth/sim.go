package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// besideBerth is where make build puts the simulators' programs: sim/ beside this one.
func besideBerth(name string) string {
	exe, err := os.Executable()
	if err != nil {
		return filepath.Join("build", "sim", name)
	}
	return filepath.Join(filepath.Dir(exe), "sim", name)
}

func (a *app) simCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Make simulated machines, for machines without a GPU",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return usageError("give create, image or library; berth sim --help tells them apart")
		},
	}
	cmd.AddCommand(a.simCreateCommand(), a.simImageCommand(), a.simLibraryCommand())
	return cmd
}

func (a *app) simCreateCommand() *cobra.Command {
	var gpus int
	var memoryMiB int64
	library, program := besideBerth("libnvidia-ml.so.1"), besideBerth("mpssim")
	cmd := &cobra.Command{
		Use:   "create DIR",
		Short: "Make a machine: NVML library, MPS programs, device nodes (root)",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if gpus < 1 {
				return usageError("--gpus: %d is less than 1", gpus)
			}
			// Two servers of 30 MiB and what the driver keeps would leave nothing below this.
			if memoryMiB < 1024 || memoryMiB > 1<<30 {
				return usageError("--gpu-memory: %d MiB is not within 1024 and %d", memoryMiB, 1<<30)
			}
			spec := nvmlsim.Uniform(gpus, func() nvmlsim.GPU {
				g := nvmlsim.H100()
				g.TotalBytes = memoryMiB << 20
				return g
			})
			m, err := nvmlsim.Create(args[0], library, spec)
			if err != nil {
				return err
			}
			if err := mpssim.Install(cmd.Context(), m.Dir, program); err != nil {
				return fmt.Errorf("%w (make build makes %s)", err, program)
			}
			if spec, err = m.Spec(); err != nil {
				return err
			}
			var ids []string
			for _, g := range spec.GPUs {
				ids = append(ids, g.UUID)
			}
			if a.json() {
				return a.printJSON(map[string]any{"machine": m.Dir, "gpus": ids})
			}
			fmt.Fprintf(a.out, "%s: %s of %d MiB\n", m.Dir, plural(gpus, "simulated GPU"), memoryMiB)
			for i, id := range ids {
				fmt.Fprintf(a.out, "  %d  %s\n", i, id)
			}
			return nil
		},
	}
	cmd.Flags().IntVar(&gpus, "gpus", 2, "number of GPUs")
	cmd.Flags().Int64Var(&memoryMiB, "gpu-memory", 81920, "memory of each GPU in MiB")
	cmd.Flags().StringVar(&library, "library", library, "the built NVML library")
	cmd.Flags().StringVar(&program, "program", program, "the built MPS simulator")
	return cmd
}

func (a *app) simImageCommand() *cobra.Command {
	program := besideBerth("mpssim")
	cmd := &cobra.Command{
		Use:   "image FILE",
		Short: "Write the sample image's root file system as a tar (berth-agent image import loads it)",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			tar, err := mpssim.SampleImage(cmd.Context(), program)
			if err != nil {
				return err
			}
			var text bytes.Buffer
			if _, err := io.Copy(&text, tar); err != nil {
				return err
			}
			if err := os.WriteFile(args[0], text.Bytes(), 0o644); err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(map[string]any{"file": args[0], "bytes": text.Len()})
			}
			fmt.Fprintf(a.out, "%s: %d bytes\n", args[0], text.Len())
			return nil
		},
	}
	cmd.Flags().StringVar(&program, "program", program, "the built MPS simulator")
	return cmd
}

func (a *app) simLibraryCommand() *cobra.Command {
	var header string
	cmd := &cobra.Command{
		Use:   "library --header DIR FILE",
		Short: "Compile the simulated libnvidia-ml.so.1 (gcc)",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := nvmlsim.Build(cmd.Context(), header, args[0]); err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(map[string]any{"file": args[0]})
			}
			fmt.Fprintln(a.out, args[0])
			return nil
		},
	}
	cmd.Flags().StringVar(&header, "header", "", "the folder of nvml.h (pkg/nvml of the go-nvml module)")
	_ = cmd.MarkFlagRequired("header")
	return cmd
}
