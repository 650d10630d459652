// Package mpssim behaves like NVIDIA MPS on machines without a GPU: the control
// daemon and its command-line utility (nvidia-cuda-mps-control), the server
// (nvidia-cuda-mps-server) and CUDA programs that use them (cuda-client), all in
// one static program, which is called by these names. A supervisor of MPS, and
// what runs under it, can be tried with real processes, sockets, locks, signals
// and containers; only the arithmetic on a GPU is missing.
//
// # What it promises
//
// Each behaviour that a program outside can see is listed in Behaviours, with what
// it rests on: seen on the real daemon, documented, or inferred. Each inferred
// one has a second variant, switched on in the steer file, so that what is built
// on MPS can be tested under both. A differential test drives this daemon and
// the real one (R535) with the same commands and compares what they do; where nothing
// says otherwise, R580, the default here, is taken to do the same.
//
// # Where it looks
//
// The program finds its simulated machine from its own path: <dir of the
// executable>/../sim holds the machine's steer file (package nvmlsim), the
// compute modes, and mps.<GPU uuid>, which steers the daemon of one GPU (Steer).
// Without such a folder there is no GPU, and no server ever becomes ready.
//
// # Who holds what
//
// The kernel is the ledger of GPU memory: a process that holds memory of a GPU
// has a memfd named cuda:<GPU uuid>:<kind>, as large as what it holds. It
// vanishes with the process, and is seen from outside through /proc, whatever
// namespaces the process lives in.
//
// # Under concurrency and crash
//
// The daemon's state is behind one mutex, which is never held while a server is
// asked something. The server decides every allocation under one lock of its own.
// Nothing is written that has to survive: a daemon killed at any moment leaves
// stale files, as the real one does, and its server goes on serving clients.
package mpssim
