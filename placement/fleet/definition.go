package fleet

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/config/taskdef"
	"github.com/berth-gpu/berth/placement/fit"
)

// definition is a record with what it asks of a machine.
type definition struct {
	record *Definition
	parsed *taskdef.Definition
	demand fit.Demand
}

// rules are those that hold on every machine. What a machine forbids besides, such as
// privileged containers, its agent refuses: the server does not know its settings.
var rules = taskdef.Rules{RunDir: "/run/berth"}

// DefinitionKey is family:revision.
func DefinitionKey(family string, revision int) string { return fmt.Sprintf("%s:%d", family, revision) }

// Register takes a task definition as the next revision of its family. One with the
// content of the newest revision is that revision. The error is taskdef.Problems.
func (f *Fleet) Register(json []byte, now time.Time) (*Definition, error) {
	d, err := f.Read(json)
	if err != nil {
		return nil, err
	}
	d.RegisteredAt = now
	if n := f.newest[d.Family]; n > 0 {
		if last := f.definitions[DefinitionKey(d.Family, n)]; last != nil && last.record.Hash == d.Hash {
			return last.record, nil
		}
	}
	d.Revision = f.newest[d.Family] + 1
	if err := f.PutDefinition(d); err != nil {
		return nil, err
	}
	return d, nil
}

// Read is a definition that has no revision yet. The error is taskdef.Problems.
func (f *Fleet) Read(json []byte) (*Definition, error) {
	parsed, err := rules.Parse(json)
	if err != nil {
		return nil, err
	}
	content := parsed.Encode()
	sum := sha256.Sum256(content)
	return &Definition{Family: *parsed.Family, Hash: hex.EncodeToString(sum[:]), JSON: content}, nil
}

// PutDefinition adds a revision. A revision never changes: another content under a key
// that is taken is an error.
func (f *Fleet) PutDefinition(d *Definition) error {
	key := DefinitionKey(d.Family, d.Revision)
	if was := f.definitions[key]; was != nil {
		if was.record.Hash != d.Hash || !bytes.Equal(was.record.JSON, d.JSON) {
			return fmt.Errorf("definition %s: it is registered with another content; register a new revision", key)
		}
		return nil
	}
	if err := f.setDefinition(d); err != nil {
		return err
	}
	f.change(KindDefinition, key, d)
	return nil
}

func (f *Fleet) setDefinition(d *Definition) error {
	parsed, err := rules.Parse(d.JSON)
	if err != nil {
		return err
	}
	f.definitions[DefinitionKey(d.Family, d.Revision)] = &definition{d, parsed, f.demand(parsed)}
	f.newest[d.Family] = max(f.newest[d.Family], d.Revision)
	return nil
}

// taken keeps a revision that something was made of from becoming another definition's,
// also where its own record was set aside.
func (f *Fleet) taken(key string) {
	family, revision, _ := strings.Cut(key, ":")
	if n, err := strconv.Atoi(revision); err == nil {
		f.newest[family] = max(f.newest[family], n)
	}
}

// domain is the trust domain of a definition's tasks: "" is the cluster's.
func (f *Fleet) domain(d *taskdef.Definition) string {
	key, tagged := strings.CutPrefix(f.trust, config.TrustTag)
	for _, t := range d.Tags {
		if tagged && t.Key != nil && *t.Key == key && t.Value != nil {
			return config.TrustTag + key + "=" + *t.Value
		}
	}
	if tagged || f.trust == config.TrustFamily {
		return config.TrustFamily + ":" + *d.Family
	}
	return ""
}

func (f *Fleet) demand(d *taskdef.Definition) fit.Demand {
	of := d.Demand()
	out := fit.Demand{CPU: of.CPU, MemoryMiB: of.MemoryMiB, GPUMemoryMiB: of.GPUMemoryMiB, Clients: of.SharedContainers, WholeGPUs: of.WholeGPUs, AllGPUs: of.AllGPUs, Trust: f.domain(d)}
	for _, p := range of.Ports {
		out.Ports = append(out.Ports, fit.Port{Number: p.Host, Protocol: p.Protocol})
	}
	return out
}

// Definition returns one revision by its key, family:revision, or nil.
func (f *Fleet) Definition(key string) *Definition {
	if d := f.definitions[key]; d != nil {
		return d.record
	}
	return nil
}

// Newest is the newest revision of a family, or nil.
func (f *Fleet) Newest(family string) *Definition {
	return f.Definition(DefinitionKey(family, f.newest[family]))
}

// Definitions returns all, by key.
func (f *Fleet) Definitions() []*Definition {
	out := make([]*Definition, 0, len(f.definitions))
	for _, d := range sorted(f.definitions) {
		out = append(out, d.record)
	}
	return out
}

// Key is what the definition is stored and named by: family:revision.
func (d *Definition) Key() string { return DefinitionKey(d.Family, d.Revision) }

// Parsed is a revision as taskdef reads it, or nil. Read it only.
func (f *Fleet) Parsed(key string) *taskdef.Definition {
	if d := f.definitions[key]; d != nil {
		return d.parsed
	}
	return nil
}

// Demand is what a task of the definition asks of a machine.
func (f *Fleet) Demand(key string) (fit.Demand, bool) {
	if d := f.definitions[key]; d != nil {
		return d.demand, true
	}
	return fit.Demand{}, false
}
