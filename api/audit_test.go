package api_test

import (
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/bus"
)

func TestAudit_Requests(t *testing.T) { // OBS-2, SEC-3
	s, _, log := withPolicies(t)
	require.Empty(t, s.call("POST", "/v1/availability", enable(obj{"mode": "failover"}), nil))
	require.Empty(t, s.call("POST", "/v1/availability/web/rollout", obj{"env": obj{"PASSWORD": "secret-value"}}, nil))
	require.Empty(t, s.call("POST", "/v1/nodes/n2/drain", nil, nil))
	require.Empty(t, s.call("PUT", "/v1/nodes/n2/name", obj{"name": "second"}, nil))
	var token api.NewToken
	require.Empty(t, s.call("POST", "/v1/tokens", api.TokenOrder{Role: "relay", ID: "r1"}, &token))
	require.Equal(t, "AVAILABILITY_SURVIVOR_REQUIRED survivor", s.call("POST", "/v1/availability/web/disable", obj{"confirm": "web"}, nil))
	require.Equal(t, "AVAILABILITY_SETTINGS_INVALID maxSurge", s.call("PATCH", "/v1/availability/web/settings", obj{"maxSurge": "secret-value"}, nil))
	require.Equal(t, "AVAILABILITY_NODE_UNKNOWN", s.call("POST", "/v1/nodes/n9/drain", nil, nil))
	require.Equal(t, "TOKEN_UNKNOWN", s.call("DELETE", "/v1/tokens/"+url.PathEscape(token.Text), nil, nil))
	require.Equal(t, "NOT_FOUND", s.call("GET", "/v1/nothing", nil, nil))

	var list api.AuditList
	require.Eventually(t, func() bool {
		list = api.AuditList{}
		return s.call("GET", "/v1/audit", nil, &list) == "" && len(list.Events) >= 10
	}, 10*time.Second, 10*time.Millisecond)
	type told struct {
		kind                                             bus.AuditKind
		workload, node, operation, code, request, method string
		path                                             string
	}
	var got []told
	for _, m := range list.Events {
		e := m.Data
		require.Contains(t, e.Who, "uid ", e.Text)
		require.NotContains(t, e.Text+e.Path, "secret-value")
		require.NotContains(t, e.Text+e.Path, token.Text)
		got = append(got, told{e.Kind, e.Workload, e.Node, e.Operation, e.Code, e.Request, e.Method, e.Path})
	}
	require.Equal(t, []told{
		{bus.AuditAccepted, "web", "", "web-1", "", "enable-availability", "POST", "/v1/availability"},
		{bus.AuditAccepted, "web", "", "web-2", "", "roll-out", "POST", "/v1/availability/web/rollout"},
		{bus.AuditAccepted, "", "n2", "", "", "drain-node", "POST", "/v1/nodes/n2/drain"},
		{bus.AuditAccepted, "", "n2", "", "", "rename-node", "PUT", "/v1/nodes/n2/name"},
		{bus.AuditAccepted, "", "", "", "", "", "POST", "/v1/tokens"},
		{bus.AuditRefused, "web", "", "", "AVAILABILITY_SURVIVOR_REQUIRED", "", "POST", "/v1/availability/web/disable"},
		{bus.AuditRefused, "web", "", "", "AVAILABILITY_SETTINGS_INVALID", "", "PATCH", "/v1/availability/web/settings"},
		{bus.AuditRefused, "", "n9", "", "AVAILABILITY_NODE_UNKNOWN", "", "POST", "/v1/nodes/n9/drain"},
		{bus.AuditRefused, "", "", "", "TOKEN_UNKNOWN", "", "DELETE", "/v1/tokens/{id}"},
		{bus.AuditRefused, "", "", "", "NOT_FOUND", "", "GET", "/v1/nothing"},
	}, got)
	require.NotContains(t, log.String(), token.Text)

	var web api.AuditList
	require.Empty(t, s.call("GET", "/v1/audit?workload=web", nil, &web))
	require.Len(t, web.Events, 4)
	require.Empty(t, s.call("GET", "/v1/audit?since="+url.QueryEscape(time.Now().Add(time.Hour).Format(time.RFC3339)), nil, &web))
	require.Empty(t, web.Events)
	resp, problem := s.do("GET", "/v1/audit?workload=%3E", nil)
	require.Equal(t, http.StatusUnprocessableEntity, resp.StatusCode)
	require.Equal(t, "REQUEST_MALFORMED", problem["code"])
}
