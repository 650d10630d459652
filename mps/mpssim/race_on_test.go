//go:build race

package mpssim

const raceEnabled = true
