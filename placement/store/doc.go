// Package store keeps the placement server's records in etcd: an embedded one by
// default, which one process has to itself and no network reaches, or an outside
// cluster on which several servers elect a leader. It alone knows etcd.
//
// Only the leader, who holds a Term, reads and writes records. Each of its writes
// is one etcd transaction that compares the leadership key, so a deposed leader
// changes nothing, and the token of the leader's write before it, so that a write
// whose answer was lost is neither done twice nor done late, after newer ones. A
// nil error of Commit means that the disk has it.
//
// A Store may be used by several goroutines. A Term is used by one at a time.
//
//	berth/format           {"v":1}: what version of berth writes here
//	berth/leader/<lease>   who leads, or waits to; the oldest leads
//	berth/token            the leader's last write
//	berth/record/<kind>/<key>   {"v":1,"d":...}
//	berth/aside/<kind>/<key>    a damaged record, after a line that says why
package store
