//! Man pages and shell completions of a program, made from its command-line arguments. Part of both
//! programs.

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::{Shell, generate_to};

/// Writes a man page for the program and one for each of its commands into `folder`, with
/// completions for bash, zsh and fish beside them. Makes the folder if it is missing.
pub(crate) fn write(mut program: Command, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut pages = without_help(program.clone());
    // Names the commands with those above them.
    pages.build();
    clap_mangen::generate_to(page(pages), folder)?;
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

/// Shortens what is above the description: NAME to one sentence, which `whatis` prints in a line,
/// and SYNOPSIS to the usage of `--help`, which has the values.
fn page(mut command: Command) -> Command {
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").to_owned();
    if let Some(about) = command.get_about().map(ToString::to_string) {
        let name = about.split(". ").next().unwrap_or_default().to_owned();
        let description = command.get_long_about().map_or(about, ToString::to_string);
        command = command.about(name).long_about(description);
    }
    command.override_usage(usage).mut_subcommands(page)
}
