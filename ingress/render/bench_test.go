package render_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/ingress/render"
)

func TestRender_TwoThousandWorkloads(t *testing.T) { // RTE-8, RTE-11
	in := many(t, manyWorkloads, 3)
	r, err := render.New(config(t))
	require.NoError(t, err)
	began := time.Now()
	g, err := r.Render(in)
	require.NoError(t, err)
	rendered := time.Now()
	accepted(t, g)
	t.Logf("render and compare %s, nginx -t %s", rendered.Sub(began), time.Since(rendered))
}
