//! Runs simulations and says which of them fail: `gw-simulation --help`.

mod campaign;
mod cli;
mod failure;
mod isolated;
mod state;

use gw_shared::process::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> std::process::ExitCode {
    cli::main()
}
