// Package taskdef is a task definition: the JSON that RegisterTaskDefinition of
// the Amazon ECS API takes, read strictly, held to ECS's rules and to those of
// sharing a GPU, and made into what placement and engine need. One table
// (fields.go) says of every field whether berth honours it, only shows it or
// refuses it; reading goes by that table, and docs/task-definition.md is
// generated from it.
//
// Everything here is a function of its arguments. It does no IO: whether a host
// path is a symbolic link to a forbidden one, and what a Docker volume that exists
// already mounts, the engine sees when it creates the container.
package taskdef
