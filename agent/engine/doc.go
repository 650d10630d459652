// Package engine speaks to Docker, and is the only one that does: it turns a
// container of a task definition and what the agent grants it into a Docker
// container, and tells how the containers of this agent are.
//
// Docker's list is the truth about containers; events are hints that say when
// to look again. Every container that this package makes carries the labels of
// [Labels] and a name made from them, so that Create can be repeated after a
// crash at any point and finds what it made. Nothing here ever removes, stops or
// adopts a container without the caller's id, and a name held by someone else's
// container is an error. Docker's own restart policy is always "no": whether a
// container starts again is the agent's decision, behind its gate.
//
// An Engine is safe for concurrent use and holds no state but the connection.
// Every call ends with its context, and by itself after the time that ECS's
// agent allows, so that a hung Docker daemon is an error with a name
// (DockerTimeoutError) and never a goroutine that waits for ever.
package engine
