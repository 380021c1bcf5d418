package carry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/system"
	"github.com/docker/docker/client"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/opfield/availability/placement"
)

// Engine is the part of the Docker client that is used.
type Engine interface {
	Info(context.Context) (system.Info, error)
	Events(context.Context, events.ListOptions) (<-chan events.Message, <-chan error)

	ContainerList(context.Context, container.ListOptions) ([]container.Summary, error)
	ContainerInspect(context.Context, string) (container.InspectResponse, error)
	ContainerStatsOneShot(context.Context, string) (container.StatsResponseReader, error)
	ContainerCreate(context.Context, *container.Config, *container.HostConfig, *network.NetworkingConfig, *ocispec.Platform, string) (container.CreateResponse, error)
	ContainerStart(context.Context, string, container.StartOptions) error
	ContainerStop(context.Context, string, container.StopOptions) error
	ContainerUnpause(context.Context, string) error
	ContainerRename(context.Context, string, string) error
	ContainerUpdate(context.Context, string, container.UpdateConfig) (container.UpdateResponse, error)
	ContainerRemove(context.Context, string, container.RemoveOptions) error

	ImageInspect(context.Context, string, ...client.ImageInspectOption) (image.InspectResponse, error)
	ImagePull(context.Context, string, image.PullOptions) (io.ReadCloser, error)
	ImagePush(context.Context, string, image.PushOptions) (io.ReadCloser, error)
	ImageTag(context.Context, string, string) error
	ImageRemove(context.Context, string, image.RemoveOptions) ([]image.DeleteResponse, error)

	NetworkInspect(context.Context, string, network.InspectOptions) (network.Inspect, error)
	NetworkCreate(context.Context, string, network.CreateOptions) (network.CreateResponse, error)
	NetworkConnect(context.Context, string, string, *network.EndpointSettings) error
}

// Registry is the way to the internal registry from this node's Docker.
type Registry interface {
	// Reference returns "127.0.0.1:<port>/<repository>@<digest>", without the
	// digest if the image has none, and "" while there is no way.
	Reference(placement.Image) string
	// Auth returns Docker's encoded credentials for it.
	Auth() string
}

// faulty is an error with the fault that it shows as.
type faulty struct {
	code  string
	final bool
	err   error
}

func (f *faulty) Error() string { return f.err.Error() }
func (f *faulty) Unwrap() error { return f.err }

// fault makes an error that is tried again.
func fault(code string, err error) error { return &faulty{code: code, err: err} }

// final makes an error that trying again cannot help.
func final(code string, err error) error { return &faulty{code: code, final: true, err: err} }

var errNoAnswer = errors.New("docker does not answer")

// within bounds one call. No answer in time, or no daemon, is its own fault.
func within[T any](ctx context.Context, limit time.Duration, verb string, call func(context.Context) (T, error)) (T, error) {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	v, err := call(bounded)
	switch {
	case err == nil || ctx.Err() != nil:
		return v, err
	case bounded.Err() != nil:
		return v, fault(placement.CodeDaemonBusy, fmt.Errorf("%s: %w within %v", verb, errNoAnswer, limit))
	case client.IsErrConnectionFailed(err):
		return v, fault(placement.CodeDaemonBusy, fmt.Errorf("%s: %w: %w", verb, errNoAnswer, err))
	}
	return v, fmt.Errorf("%s: %w", verb, err)
}

// do is within for a call without a result.
func do(ctx context.Context, limit time.Duration, verb string, call func(context.Context) error) error {
	_, err := within(ctx, limit, verb, func(ctx context.Context) (struct{}, error) { return struct{}{}, call(ctx) })
	return err
}
