package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/api/agentpb"
)

// receive takes in what the server says. It waits for nobody.
func (s *session) receive(ctx context.Context) {
	for {
		m, err := s.stream.Recv()
		if err != nil {
			s.end(broken, fmt.Errorf("the stream broke: %w", plainly(err)))
			return
		}
		// What lay in the buffers of an agent that was stopped with its machine was said
		// to another time.
		now := time.Now()
		if silence := now.Sub(*s.heardAt.Load()); silence > s.lease {
			s.end(broken, s.silent(silence))
			return
		}
		s.heardAt.Store(&now)
		s.agent.heard()
		switch is := m.Is.(type) {
		case *agentpb.FromServer_Orders:
			select { // newer ones take their place; nobody else puts any in
			case <-s.orders:
			default:
			}
			s.orders <- is.Orders
		case *agentpb.FromServer_Log:
			s.logs.begin(ctx, is.Log)
		case *agentpb.FromServer_LogMore:
			s.logs.allow(is.LogMore.Id, is.LogMore.Bytes)
		case *agentpb.FromServer_LogCancel:
			s.logs.cancel(is.LogCancel.Id)
		case *agentpb.FromServer_Refusal:
			e := refusal(is.Refusal)
			s.end(e.how, e.err)
			return
		} // anything else is a pulse, or a word of a newer protocol
	}
}

func (s *session) silent(silence time.Duration) error {
	return fmt.Errorf("the server was silent for %s, and the lease is %s", silence.Round(time.Millisecond), s.lease)
}

// obey hands the newest orders to the agent, and keeps the answer to them.
func (s *session) obey(ctx context.Context) {
	var o *agentpb.Orders
	var again <-chan time.Time
	for {
		select {
		case o = <-s.orders:
		case <-again:
		case <-ctx.Done():
			return
		}
		why, err := s.agent.want(ctx, order(o, s.term))
		again = nil
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, agent.ErrOldTerm):
			s.end(notLeader, err)
			return
		case err != nil:
			s.log.Error("cannot take the server's orders, retrying", zap.Error(err))
			again = time.After(obeyAgain)
			continue
		}
		s.keep(answer{revision: o.Revision, refused: refusals(o, why)})
	}
}

func (s *session) keep(a answer) {
	s.mu.Lock()
	before := s.answer.refused
	s.answer = a
	s.mu.Unlock()
	for _, r := range a.refused {
		if !slices.ContainsFunc(before, func(old *agentpb.Refused) bool { return old.Name == r.Name && old.Generation == r.Generation }) {
			s.log.Warn("wanted task refused", zap.String("name", r.Name), zap.Uint64("generation", r.Generation), zap.String("why", r.Why))
		}
	}
	select {
	case s.stored <- struct{}{}:
	default:
	}
}

// send reports: all at first, then what has changed, and at each pulse anything.
// Chunks of logs go between reports.
func (s *session) send(ctx context.Context) {
	var said told
	var last time.Time // of the last report
	for {
		// 1. What has changed. The answer is read before the view, which has what was
		// stored for it.
		changed := s.agent.changed()
		s.mu.Lock()
		answer := s.answer
		s.answer.told = true
		s.mu.Unlock()
		now := time.Now()
		report, err := said.report(s.agent.view(), now)
		if err != nil {
			s.end(broken, fmt.Errorf("report: %w", err))
			return
		}
		if report == nil && (!answer.told || now.Sub(last) >= s.pulse) {
			report = &agentpb.Report{}
		}
		// 2. Say it.
		if report != nil {
			report.Orders = answer.revision
			if !answer.told {
				report.Refused = answer.refused
			}
			if !s.put(&agentpb.FromAgent{Is: &agentpb.FromAgent_Report{Report: report}}) {
				return
			}
			last = now
		}
		// 3. Wait for something to say, and a little more for what comes with it.
		pulse := time.NewTimer(s.pulse - now.Sub(last))
		var chunk *agentpb.LogChunk
		select {
		case <-changed:
		case <-s.stored:
		case <-pulse.C:
		case chunk = <-s.logs.chunks:
		case <-ctx.Done():
		}
		pulse.Stop()
		switch {
		case ctx.Err() != nil:
			return
		case chunk != nil:
			if !s.put(&agentpb.FromAgent{Is: &agentpb.FromAgent_Log{Log: chunk}}) {
				return
			}
		default:
			wait(ctx, betweenSends-time.Since(last))
		}
	}
}

// put sends one message; the server may be slow to take it.
func (s *session) put(m *agentpb.FromAgent) bool {
	now := time.Now()
	s.sendSince.Store(&now)
	err := s.stream.Send(m)
	s.sendSince.Store(nil)
	if err != nil && !errors.Is(err, io.EOF) { // of EOF receive learns more
		s.end(broken, fmt.Errorf("the stream broke: %w", plainly(err)))
	}
	return err == nil
}

// watch hangs up on a server that says nothing, or takes nothing, for the lease.
func (s *session) watch(ctx context.Context) {
	tick := time.NewTicker(s.lease / 4)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		if silence := now.Sub(*s.heardAt.Load()); silence > s.lease {
			s.end(broken, s.silent(silence))
		}
		if since := s.sendSince.Load(); since != nil && now.Sub(*since) > s.lease {
			s.end(broken, fmt.Errorf("the server took nothing for %s, and the lease is %s", now.Sub(*since).Round(time.Millisecond), s.lease))
		}
	}
}

func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
