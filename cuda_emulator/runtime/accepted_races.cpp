#include "accepted_races.h"

#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "source_lines.h"

namespace emulator {
namespace {

std::map<std::string, std::set<int>> accepted;  // lines by library
// By line. Never destroyed, since a plain program tells of them at its end.
std::map<int, unsigned long long>& counts = *new std::map<int, unsigned long long>;
std::unordered_map<const void*, int> line_of;  // by instruction: its accepted line, or 0

int accepted_line(const void* instruction) {
    const auto [found, is_new] = line_of.try_emplace(instruction, 0);
    if (!is_new) return found->second;
    const SourceLines& at = source_lines(instruction);
    if (const auto lines = accepted.find(at.library); lines != accepted.end())
        for (const int line : at.lines)
            if (lines->second.count(line)) return found->second = line;
    return 0;
}

}  // namespace

bool is_accepted_race(const void* instruction, const void* other) {
    if (accepted.empty()) return false;
    int line = accepted_line(instruction);
    if (!line) line = accepted_line(other);
    if (line) ++counts[line];
    return line != 0;
}

}  // namespace emulator

extern "C" {
void emulator_accept_races(const char* library, int line) {
    emulator::accepted[library].insert(line);
    emulator::line_of.clear();
}

// "line count" in each line.
const char* emulator_accepted_races() {
    static std::string text;
    text.clear();
    for (const auto& [line, count] : emulator::counts) text += std::to_string(line) + " " + std::to_string(count) + "\n";
    return text.c_str();
}
}
