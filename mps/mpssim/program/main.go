// Command mpssim is the simulator of NVIDIA MPS: called as
// nvidia-cuda-mps-control, nvidia-cuda-mps-server or cuda-client it behaves as
// the program of that name. All of it is in package mpssim.
package main

import (
	"os"

	"github.com/berth-gpu/berth/mps/mpssim"
)

func main() { os.Exit(mpssim.Main(os.Args, os.Stdin, os.Stdout, os.Stderr)) }
