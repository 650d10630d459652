// Package config holds what operators write: the settings of an agent, read
// from a YAML file and from the environment, decoded strictly, defaulted and
// checked. One table (settings.go) states each setting once: its key, its
// BERTH_ and ECS_ names, its default, its rule and its sentence of help; the
// loader, docs/settings.md and config/berth-agent.yaml all come from it.
//
// Nothing here reads the disk but Load, which reads one file. A loaded Agent
// is a plain value, changed by nobody afterwards, so it may be shared freely.
package config
