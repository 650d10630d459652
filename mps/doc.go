// Package mps holds GPUs through NVIDIA MPS and knows nothing else: one control
// command, one control daemon per GPU, the supervisor that keeps it, the
// environment that caps a client. It is the only package that spells a
// CUDA_MPS_* name.
//
// A [Holder] owns one GPU. Its loop is thin: every decision is [Step], a pure
// function of (state, event, time), drawn above [Phase]. Under concurrency it
// promises: all methods of a Holder may be called from any goroutine, at any
// time, before and after Run; commands to one daemon are never issued at the
// same time; every command has a deadline. Across a crash of the agent it
// promises: what would be needed to find a daemon again is saved before that
// daemon is started; Run leaves the daemon running when its context ends; a new
// Holder with the saved [Record] adopts daemon and server and restarts neither;
// no process is killed unless its pid, start time and BERTH_MPS_ID are those
// that were recorded.
//
// What the outside world does is written beside the code that copes with it:
// [B] seen on the real daemon (R535), [D] NVIDIA's documentation, (inf) inferred.
package mps
