package ingress

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/opfield/availability/placement"
)

// Link endpoints live in 127.64.0.0/10. The first 256 addresses are kept for
// ourselves: 127.64.0.1 stands for "no placement" and is never given away.
const (
	firstAddress = 127<<24 | 64<<16 | 1<<8
	lastAddress  = 127<<24 | 127<<16 | 255<<8 | 254
	// reuseAfter is how long the address of a link that is gone belongs to
	// nobody: an old nginx worker may still connect to it.
	reuseAfter = 24 * time.Hour
)

// addressBook gives every link a loopback address and never the address of
// one link to another within reuseAfter. It belongs to the loop.
type addressBook struct {
	byLink map[placement.LinkID]netip.Addr
	taken  map[netip.Addr]holder
	next   uint32
	dirty  bool
}

type holder struct {
	link placement.LinkID
	gone time.Time // zero while the link exists
}

// storedAddress is one line of the address file.
type storedAddress struct {
	Link string     `json:"link"`
	Addr netip.Addr `json:"addr"`
	Gone time.Time  `json:"gone,omitzero"`
}

type storedAddresses struct {
	Next      uint32          `json:"next"`
	Addresses []storedAddress `json:"addresses"`
}

// newAddressBook reads a stored book. Without one it begins somewhere that
// depends on the time, so that a lost file does not give away addresses that
// old workers use.
func newAddressBook(stored []byte, now time.Time) (*addressBook, error) {
	b := &addressBook{byLink: map[placement.LinkID]netip.Addr{}, taken: map[netip.Addr]holder{}}
	b.next = firstAddress + uint32(now.Unix()*977%(lastAddress-firstAddress))
	if len(stored) == 0 {
		return b, nil
	}
	var s storedAddresses
	if err := json.Unmarshal(stored, &s); err != nil {
		return b, fmt.Errorf("read addresses: %w", err)
	}
	if s.Next >= firstAddress && s.Next <= lastAddress {
		b.next = s.Next
	}
	for _, a := range s.Addresses {
		id, err := placement.ParseLinkID(a.Link)
		if err != nil || !validAddress(a.Addr) {
			continue
		}
		b.taken[a.Addr] = holder{link: id, gone: a.Gone}
		b.byLink[id] = a.Addr
	}
	return b, nil
}

func validAddress(a netip.Addr) bool {
	if !a.Is4() {
		return false
	}
	n := toNumber(a)
	return n >= firstAddress && n <= lastAddress
}

func toNumber(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func toAddress(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// update gives an address to every link and marks those that are gone.
func (b *addressBook) update(links []placement.LinkID, now time.Time) {
	exists := make(map[placement.LinkID]bool, len(links))
	for _, id := range links {
		exists[id] = true
		addr, ok := b.byLink[id]
		if ok {
			if h := b.taken[addr]; !h.gone.IsZero() {
				b.taken[addr] = holder{link: id}
				b.dirty = true
			}
			continue
		}
		addr = b.free()
		b.byLink[id], b.taken[addr] = addr, holder{link: id}
		b.dirty = true
	}
	if len(exists) == len(b.byLink) {
		return
	}
	for id, addr := range b.byLink {
		h := b.taken[addr]
		switch {
		case exists[id]:
		case h.gone.IsZero():
			b.taken[addr] = holder{link: id, gone: now}
			b.dirty = true
		case now.Sub(h.gone) >= reuseAfter:
			delete(b.byLink, id)
			delete(b.taken, addr)
			b.dirty = true
		}
	}
}

func (b *addressBook) free() netip.Addr {
	for {
		n := b.next
		b.next++
		if b.next > lastAddress {
			b.next = firstAddress
		}
		// Some tools take the last byte 0 or 255 for a network's.
		if n&0xff == 0 || n&0xff == 0xff {
			continue
		}
		if _, used := b.taken[toAddress(n)]; !used {
			return toAddress(n)
		}
	}
}

// get returns the address of a link.
func (b *addressBook) get(id placement.LinkID) (netip.Addr, bool) {
	a, ok := b.byLink[id]
	return a, ok
}

// snapshot returns a lookup that another goroutine may use.
func (b *addressBook) snapshot(links []placement.LinkID) map[placement.LinkID]netip.Addr {
	out := make(map[placement.LinkID]netip.Addr, len(links))
	for _, id := range links {
		if a, ok := b.byLink[id]; ok {
			out[id] = a
		}
	}
	return out
}

func (b *addressBook) encode() ([]byte, error) {
	s := storedAddresses{Next: b.next}
	for id, addr := range b.byLink {
		s.Addresses = append(s.Addresses, storedAddress{Link: id.String(), Addr: addr, Gone: b.taken[addr].gone})
	}
	return json.Marshal(s)
}
