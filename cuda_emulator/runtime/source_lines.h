// Which lines of the kernel text an instruction belongs to. It asks addr2line, so it is for rare questions; answers are kept.
#pragma once
#include <string>
#include <vector>

namespace emulator {

struct SourceLines {
    std::string library;
    std::vector<int> lines;  // its own, then those of the calls that it was inlined into; empty if that is not known
};
// `instruction` is the one behind a call, as a return address is.
const SourceLines& source_lines(const void* instruction);

}  // namespace emulator
