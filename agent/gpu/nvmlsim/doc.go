// Package nvmlsim makes and steers simulated GPU machines. A machine is a
// folder with a libnvidia-ml.so.1 (lib/, in C) that any NVML client loads
// unchanged, character nodes like those of the driver, and a steer file that the
// library reads again whenever it has changed. What processes hold of a GPU is no
// part of the file: a simulated CUDA process holds a memfd named
// cuda:<GPU uuid>:<kind>, its size the bytes held, and the library finds these in
// /proc. So the kernel is the ledger, across namespaces, and what a process held
// is gone with it.
//
//	<machine>/lib/libnvidia-ml.so.1
//	<machine>/bin/                   for mpssim's binaries
//	<machine>/dev/nvidia<minor>      195:<minor>, and nvidiactl, nvidia-uvm
//	<machine>/sim/machine            the steer file
//	<machine>/sim/mode.<GPU uuid>    the compute mode, one digit; absent is 0
//
// # The steer file
//
// One `key value` a line; # begins a comment line. It is replaced by rename and never
// written in place. First the machine's keys:
//
//	driver 580.159.03
//	nvml 13.580.159.03
//	cuda 13000
//	variant mps-clients-in-compute-list
//	hang DeviceGetUtilizationRates [uuid]        one of Calls, or *
//	fail DeviceGetComputeMode UNKNOWN [uuid]     NVML_ERROR_ and this word
//	xid 7 GPU-... 31                             sequence, GPU, code
//
// Then one group of keys for each GPU, in order of NVML's index, begun by its gpu line:
//
//	gpu GPU-6f3c1a52-0d5e-4b7e-9a53-2f4c1f0e8d11
//	minor 4096
//	name NVIDIA H200
//	total 150753771520                           bytes
//	reserved 646971392                           bytes
//	arch 9                                       NVML_DEVICE_ARCH_*
//	cc 9.0                                       compute capability
//	pci 00000000:18:00.0
//	pcidevice 0x233510de
//	numa 0                                       -1: NVML knows none
//	pcieswitch 0                                 same number: behind one switch
//	mig 0                                        -1: not supported
//	virtualization 0                             NVML_GPU_VIRTUALIZATION_MODE_*, -1: not supported
//	ecc 1                                        -1: not supported
//	util 0 0                                     percent of GPU and memory while in use
//	lost 1                                       fell off the bus
//	nvlink 00000000:06:00.0 switch up            remote bus id, gpu|switch, up|down; in order of link
//
// Several processes may steer one machine: an update takes a lock on sim/lock, reads, changes
// and renames. The library needs no lock, since it sees one file or the next.
package nvmlsim
