// Package flight is berth's flight recorder: what the pure machines decided
// (state and event in, new state and actions out), kept in a bounded ring on
// disk, and run again through the same code when somebody asks why.
//
// A ring is a folder of a few files, each with one JSON object a line. Whoever
// records is never kept waiting by the disk: the entry is encoded at once, so
// that what it was made of may change afterwards, and a goroutine that the
// [Recorder] owns writes it. What finds no room is dropped and counted, and the
// count stands in the ring where the entries would have stood.
//
// Across a crash: what was written stays, in order; the entries that waited for
// the writer are lost (Close writes them), and an entry that was being written
// is cut off by the next Open, which says so in the ring. Nothing is synced: after a
// loss of power the ring may lack its last seconds. Across processes: one records
// into a folder at a time, any number read it meanwhile.
package flight
