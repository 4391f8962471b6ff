use std::process::ExitCode;

/// Large allocations come and go with every request body and batch of vectors; this allocator gives
/// their memory back sooner than the system's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    ragstone::cli::run()
}
