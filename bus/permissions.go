package bus

import (
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// rights are the subjects an identity may publish and subscribe to.
type rights struct {
	name               identity.Name
	publish, subscribe []string
}

// rightsOf returns the least an identity needs. grant limits the workloads a
// node announces; a grant with prefixes cannot be expressed as subjects, so
// there the CA alone enforces it, by not signing the workload's certificate.
func rightsOf(n identity.Name, grant identity.Grant) rights {
	if n.Role == identity.RoleController {
		return rights{name: n, publish: []string{">"}, subscribe: []string{">"}}
	}
	r := rights{name: n, subscribe: []string{inboxPrefix(n) + ".>"}}
	if n.Role != identity.RoleSubscriber {
		r.publish = append(r.publish, member(subjectStatus, n), member(subjectSign, n))
		r.reads(BucketRelays)
		r.reads(BucketRevoked)
	}
	switch n.Role {
	case identity.RoleNode:
		r.publish = append(r.publish, member(subjectLast, n), member(subjectInventory, n))
		r.publish = append(r.publish, announces(n.ID, grant)...)
		r.publish = append(r.publish, member(subjectReport, n), member(subjectInspected, n)+".*", readDesired(n.ID), readDesired(n.ID+".*"))
		r.subscribe = append(r.subscribe, placement.SubjectPrefix+"*."+n.ID, member(subjectInspect, n))
		r.subscribe = append(r.subscribe, subjectChanged+BucketDesired+"."+n.ID, subjectChanged+BucketDesired+"."+n.ID+".*")
	case identity.RoleIngress:
		r.followsPlacements()
		r.reads(BucketRoutes)
		r.reads(BucketCerts)
		r.reads(BucketMembers)
	case identity.RoleSubscriber:
		r.followsPlacements()
	}
	return r
}

func announces(node string, grant identity.Grant) []string {
	names, exact := grant.Exact()
	if !exact {
		return []string{placement.SubjectPrefix + "*." + node}
	}
	var out []string
	for _, w := range names {
		out = append(out, placement.ID{Workload: w, Node: node}.Subject())
	}
	return out
}

func (r *rights) reads(bucket string) {
	r.publish = append(r.publish, readSubject(r.name, kvStream(bucket)))
	r.subscribe = append(r.subscribe, subjectChanged+bucket+".>")
}

func (r *rights) followsPlacements() {
	r.publish = append(r.publish, readSubject(r.name, streamPlacements), readSubject(r.name, streamNodes))
	r.subscribe = append(r.subscribe, subjectPlacements, subjectNodes+">")
}
