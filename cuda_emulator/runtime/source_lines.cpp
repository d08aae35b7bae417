#include "source_lines.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>

namespace emulator {

const SourceLines& source_lines(const void* instruction) {
    static std::map<const void*, SourceLines> known;
    const auto [found, is_new] = known.try_emplace(instruction);
    SourceLines& answer = found->second;
    Dl_info info{};
    if (!is_new || !dladdr(instruction, &info) || !info.dli_fname) return answer;
    answer.library = info.dli_fname;
    char offset[32];
    snprintf(offset, sizeof offset, "%#llx", (unsigned long long)((uintptr_t)instruction - (uintptr_t)info.dli_fbase - 1));
    std::string command = "addr2line -i -e '";
    for (const char c : answer.library) command += c == '\'' ? std::string("'\\''") : std::string(1, c);
    FILE* output = popen((command + "' " + offset + " 2>/dev/null").c_str(), "r");
    if (!output) return answer;
    char* line = nullptr;
    size_t capacity = 0;
    while (getline(&line, &capacity, output) > 0)
        if (const char* colon = strrchr(line, ':')) answer.lines.push_back(atoi(colon + 1));  // "file:12 (discriminator 3)"
    free(line);
    pclose(output);
    return answer;
}

}  // namespace emulator
