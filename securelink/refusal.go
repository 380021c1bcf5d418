package securelink

import (
	"errors"
	"fmt"
)

// Code says why a stream or a session was refused.
type Code uint8

// The refusals of protocol version 1. Zero means unknown.
const (
	NotRegistered Code = iota + 1 // the relay has no such link
	NotReady                      // registered, but the placement does not serve
	StaleEpoch                    // the caller or the placement has an older epoch
	AppRefused                    // the application refused the connection
	Timeout                       // the application did not answer in time
	OverLimit                     // a limit of the relay is reached
	Unauthorised                  // this peer may not do that
	ShuttingDown                  // the relay or the node is going away
)

func (c Code) String() string {
	switch c {
	case NotRegistered:
		return "not registered"
	case NotReady:
		return "not ready"
	case StaleEpoch:
		return "stale epoch"
	case AppRefused:
		return "refused by the application"
	case Timeout:
		return "timeout"
	case OverLimit:
		return "over limit"
	case Unauthorised:
		return "unauthorised"
	case ShuttingDown:
		return "shutting down"
	default:
		return fmt.Sprintf("refusal %d", uint8(c))
	}
}

// AboutPlacement reports whether the refusal says something about the
// placement rather than about the relay that sent it.
func (c Code) AboutPlacement() bool {
	switch c {
	case NotRegistered, NotReady, StaleEpoch, AppRefused, Timeout:
		return true
	default:
		return false
	}
}

// Refusal is the typed answer of a relay or an accepting end.
type Refusal struct {
	Code  Code
	Relay string // filled by the dialing end
}

// Error implements error.
func (r *Refusal) Error() string {
	if r.Relay != "" {
		return "relay " + r.Relay + ": " + r.Code.String()
	}
	return r.Code.String()
}

// RefusalCode returns the code of a refusal in err's chain, or zero.
func RefusalCode(err error) Code {
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r.Code
	}
	return 0
}

// EncodeRefusal appends a refusal frame (FrameRefused or FrameRefuse) to b.
func EncodeRefusal(b []byte, t FrameType, c Code) []byte {
	return AppendFrame(b, t, []byte{byte(c)})
}

// DecodeRefusal decodes the body of a refusal frame.
func DecodeRefusal(body []byte) (Code, error) {
	d := decoder{b: body}
	c := Code(d.u8())
	return c, d.done()
}
