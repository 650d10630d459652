package config

// Warning is something in the environment that berth does not honour and that
// an operator may believe it does.
type Warning struct {
	Name string // ECS_ENABLE_TASK_ENI
	Says string
}

// Load reads the settings of an agent: environ's BERTH_ names over its ECS_
// names over the file at path over the defaults. An empty path reads no file.
// Every problem is in the error, one a line.
func Load(path string, environ []string) (*Agent, []Warning, error) {
	return nil, nil, nil
}
