//! Runs simulations and says which of them fail: `gw-simulation --help`.

mod campaign;
mod cli;
mod failure;
mod isolated;
mod state;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    cli::main()
}
