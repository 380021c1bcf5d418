package registry

import (
	"encoding/json"
	"net/http"
)

// answer answers with an error as the distribution specification has it.
func answer(w http.ResponseWriter, status int, code, message string) {
	type item struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string][]item{"errors": {{code, message}}})
}
