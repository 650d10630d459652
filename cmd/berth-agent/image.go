package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/agent/engine"
)

func imageCommand() *cobra.Command {
	image := &cobra.Command{Use: "image", Short: "Load images where there is no registry"}
	var changes []string
	load := &cobra.Command{Use: "import FILE REF", Short: "Make an image of a root file system's tar file, as docker import does", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			settings, log, err := load(cmd)
			if err != nil {
				return err
			}
			f, err := os.Open(args[0])
			if err != nil {
				return err
			}
			defer f.Close()
			docker, err := engine.Open(cmd.Context(), settings.Docker.Host, log)
			if err != nil {
				return err
			}
			defer docker.Close()
			id, err := docker.LoadImage(cmd.Context(), args[1], f, changes)
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), args[1], id)
			return nil
		}}
	load.Flags().StringArrayVar(&changes, "change", nil, `a Dockerfile line for the image, such as 'ENTRYPOINT ["/bin/app"]'`)
	image.AddCommand(load)
	return image
}
