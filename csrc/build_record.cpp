// What a library was built for, as text inside the file: read before it is loaded, because one built
// for another torch may load without complaint and then call the wrong virtual functions.

#define SMP_TEXT_OF(value) #value
#define SMP_TEXT(value) SMP_TEXT_OF(value)

extern "C" __attribute__((used, visibility("default"))) const char lightning_smp_build_record[] =
    "lightning_smp build record{torch=" SMP_TEXT(SMP_BUILT_TORCH) "|cuda=" SMP_TEXT(
        SMP_BUILT_CUDA) "|python=" SMP_TEXT(SMP_BUILT_PYTHON) "|sources=" SMP_TEXT(SMP_BUILT_SOURCES) "}";
