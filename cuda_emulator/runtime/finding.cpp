#include "finding.h"

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include <utility>

namespace emulator {
namespace {

// Lines of "key=value", newlines in values replaced: easily read by the Python side.
void put(std::string& text, const char* key, std::string value) {
    for (char& c : value)
        if (c == '\n') c = ' ';
    text += std::string(key) + "=" + value + "\n";
}

std::string triple(const uint3& v) { return std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z); }

void put_party(std::string& text, const std::string& prefix, const Party& party) {
    if (party.known) {  // else host code did it
        put(text, (prefix + "block").c_str(), triple(party.block));
        put(text, (prefix + "thread").c_str(), triple(party.thread));
        put(text, (prefix + "did").c_str(), party.did);
    }
    if (party.place.line) put(text, (prefix + "line").c_str(), std::to_string(party.place.line));
    if (party.place.instruction) {
        Dl_info info{};
        if (dladdr(party.place.instruction, &info) && info.dli_fname) {
            put(text, (prefix + "library").c_str(), info.dli_fname);
            // The recorded address is the one after the call, which may belong to the next line.
            put(text, (prefix + "offset").c_str(),
                std::to_string((uintptr_t)party.place.instruction - (uintptr_t)info.dli_fbase - 1));
        }
    }
}

void (*receiver)(const char*) = nullptr;
std::string pending;
thread_local int keeping = 0;  // callers of this thread through which nothing can be thrown

}  // namespace

void deliver(const Finding& finding) {
    std::string text;
    put(text, "kind", finding.kind);
    put(text, "message", finding.message);
    put(text, "kernel", finding.kernel);
    put(text, "kernel_line", std::to_string(finding.kernel_line));
    for (const auto& [key, value] :
         {std::pair("object", &finding.object), std::pair("why", &finding.why), std::pair("somebody", &finding.somebody)})
        if (!value->empty()) put(text, key, *value);
    if (finding.parameter) put(text, "parameter", std::to_string(finding.parameter));
    if (finding.argument) put(text, "argument", std::to_string(finding.argument));
    put_party(text, "", finding.party);
    put_party(text, "other_", finding.other);
    if (receiver && !keeping) receiver(text.c_str());  // raises
    if (pending.empty()) pending = text;
}

void host_runs_device_code(const char* what, Place place) {
    Finding finding;
    finding.kind = "device code on the host";
    finding.message = std::string("host code asks for ") + what +
                      ", which only a kernel has (here __CUDA_ARCH__ is defined for host code, too)";
    finding.party.place = place;
    finding.kernel_line = place.line;
    deliver(finding);
}

bool finding_pending() { return !pending.empty(); }

}  // namespace emulator

extern "C" {
void emulator_set_receiver(void (*receiver)(const char*)) { emulator::receiver = receiver; }

// While `change` adds up to more than 0, findings of this thread are kept, and cudaGetLastError says that there is one.
void emulator_keep_findings(int change) { emulator::keeping += change; }
int emulator_finding_pending() { return emulator::finding_pending(); }

// Copies the pending finding and forgets it; returns its length, 0 if there is none.
int emulator_take_finding(char* out, int size) {
    if (emulator::pending.empty()) return 0;
    strncpy(out, emulator::pending.c_str(), size - 1);
    out[size - 1] = 0;
    emulator::pending.clear();
    return (int)strlen(out);
}
}
