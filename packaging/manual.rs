//! Man pages and shell completions of a program, made from its command-line arguments. Part of both programs.

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::{Shell, generate_to};

/// Writes a man page for the program and one for each of its commands into `folder`, with completions for bash, zsh and
/// fish beside them. Makes the folder if it is missing.
pub(crate) fn write(mut program: Command, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(without_help(program.clone()), folder)?;
    let name = program.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut program, &name, folder)?;
    }
    Ok(())
}

/// Removes the commands `help`, which say no more than `--help`.
fn without_help(command: Command) -> Command {
    command
        .disable_help_subcommand(true)
        .mut_subcommands(without_help)
}
