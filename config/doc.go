// Package config holds what operators write: the settings of an agent and of a
// placement server, read from a YAML file and from the environment, decoded
// strictly, defaulted and checked. One table each (settings.go,
// server_settings.go) states each setting once: its key, its names in the
// environment, its default, its rule and its sentence of help; the loader,
// docs/settings.md and the examples in this folder all come from it.
//
// Nothing here reads the disk but Load and LoadServer, which read one file. What
// they return is a plain value, changed by nobody afterwards, so it may be shared
// freely.
package config
