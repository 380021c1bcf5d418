package apply

// Isolate finds the routes that test refuses, by halving; all of names
// together were refused already. test gets the names that are to be kept and
// returns nil if they can be used together. The result is the reason per
// refused name. If not even an empty set passes, the routes are not to blame
// and its error is returned.
func Isolate(names []string, test func(keep []string) error) (map[string]error, error) {
	if err := test(nil); err != nil {
		return nil, err
	}
	var good []string
	bad := map[string]error{}
	var add func(chunk []string)
	add = func(chunk []string) {
		if len(chunk) == 0 {
			return
		}
		try := append(append([]string(nil), good...), chunk...)
		err := test(try)
		switch {
		case err == nil:
			good = try
		case len(chunk) == 1:
			bad[chunk[0]] = err
		default:
			add(chunk[:len(chunk)/2])
			add(chunk[len(chunk)/2:])
		}
	}
	add(names[:len(names)/2])
	add(names[len(names)/2:])
	return bad, nil
}
