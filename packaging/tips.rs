//! Tips in errors of the command line. Part of both programs.

use std::error::Error as _;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error, Parser};

/// Parses the arguments of this process. Ends it on a mistake, with a message that has a tip.
/// `meant` explains a word that is no command, and an option that is missing.
pub(crate) fn parse<P: Parser>(meant: impl Fn(&str) -> Option<String>) -> P {
    P::try_parse().unwrap_or_else(|mut error| {
        let words: Vec<String> = std::env::args_os()
            .skip(1)
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        add(&mut error, P::command(), &words, meant);
        error.exit()
    })
}

/// Adds a tip to the error of `words`.
fn add(
    error: &mut Error,
    mut program: Command,
    words: &[String],
    meant: impl Fn(&str) -> Option<String>,
) {
    // Gives each command the options of those above it.
    program.build();
    let is_wrong = |word: &&String| {
        error.kind() == ErrorKind::InvalidSubcommand && named(error).as_ref() == Some(*word)
    };
    let before = words.iter().take_while(|word| !is_wrong(word));
    let reached = before.fold(&program, |command, word| {
        command.find_subcommand(word).unwrap_or(command)
    });
    let tip = match (error.kind(), named(error)) {
        (ErrorKind::InvalidSubcommand, Some(word)) => {
            let is_first = std::ptr::eq(reached, &raw const program);
            let meant = is_first.then(|| meant(&word)).flatten();
            if meant.is_some() {
                error.remove(ContextKind::SuggestedSubcommand);
            }
            meant.or_else(|| {
                let is_similar = error.get(ContextKind::SuggestedSubcommand).is_some();
                (!is_similar).then(|| commands(reached))
            })
        }
        (ErrorKind::UnknownArgument, Some(option))
            if option.starts_with('-') && meant(&option).is_some() =>
        {
            meant(&option)
        }
        (ErrorKind::UnknownArgument, _) => {
            // Names cannot begin with a hyphen, so `-- --option` does not help.
            if !text_of(error, ContextKind::Suggested).contains("as a value") {
                return;
            }
            error.remove(ContextKind::Suggested);
            options(reached)
        }
        (ErrorKind::MissingRequiredArgument, Some(option)) => meant(&option),
        (ErrorKind::ValueValidation, _) => error
            .source()
            .and_then(|source| form(&source.to_string()).map(str::to_owned)),
        _ => None,
    };
    if let Some(tip) = tip {
        let tips = ContextValue::StyledStrs(vec![StyledStr::from(tip)]);
        error.insert(ContextKind::Suggested, tips);
    }
}

/// The word that is no command, or the first argument that is missing.
fn named(error: &Error) -> Option<String> {
    let context = [ContextKind::InvalidSubcommand, ContextKind::InvalidArg];
    match context.into_iter().find_map(|kind| error.get(kind))? {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(texts) => texts.first().cloned(),
        _ => None,
    }
}

fn text_of(error: &Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::StyledStrs(texts)) => texts.iter().map(ToString::to_string).collect(),
        _ => String::new(),
    }
}

fn commands(of: &Command) -> String {
    let names: Vec<&str> = of
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
        .map(Command::get_name)
        .collect();
    format!("the commands are {}", names.join(", "))
}

/// The options of a command without those that many commands have; `None` if there are none.
fn options(of: &Command) -> Option<String> {
    let own = of
        .get_arguments()
        .filter(|option| !option.is_global_set() && !option.is_hide_set());
    let names: Vec<String> = own
        .filter_map(|option| option.get_long())
        .filter(|name| !["help", "version"].contains(name))
        .map(|name| format!("--{name}"))
        .collect();
    (!names.is_empty()).then(|| format!("the options of this command are {}", names.join(", ")))
}

/// The form of a value that the standard library refuses with this message.
fn form(message: &str) -> Option<&'static str> {
    match message {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            Some("write a whole number, such as 3000")
        }
        "invalid socket address syntax" => {
            Some("write an IP address and a port, such as 127.0.0.1:8443")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    /// The message about a command line.
    fn message(line: &str) -> String {
        let option = |name: &'static str| Arg::new(name).long(name);
        let create = Command::new("create")
            .arg(Arg::new("name").required(true))
            .arg(option("with-key").action(ArgAction::SetTrue))
            .arg(option("port").value_parser(clap::value_parser!(u16)))
            .arg(option("at").value_parser(clap::value_parser!(std::net::SocketAddr)));
        let program = Command::new("program")
            .subcommand(
                Command::new("service")
                    .subcommand_required(true)
                    .subcommand(create)
                    .subcommand(Command::new("delete").arg(Arg::new("name"))),
            )
            .subcommand(Command::new("serve").arg(option("config").required(true)));
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let meant = |word: &str| match word {
            "version" | "-v" => Some("`program --version` prints it".to_owned()),
            "--config <config>" => Some("`init` writes one".to_owned()),
            _ => None,
        };
        let tried = program
            .clone()
            .try_get_matches_from(["program"].into_iter().chain(line.split(' ')));
        let mut error = tried.unwrap_err();
        add(&mut error, program, &words, meant);
        error.to_string()
    }

    #[test]
    fn mistakes_of_the_command_line_come_with_what_was_meant() {
        for (line, tips) in [
            ("version", &["tip: `program --version` prints it"][..]),
            ("version service", &["tip: `program --version` prints it"]),
            ("-v", &["tip: `program --version` prints it"]),
            ("servce", &["'serve'"]),
            ("list", &["tip: the commands are service, serve"]),
            ("service add", &["tip: the commands are create, delete"]),
            (
                "service create a --key",
                &["tip: the options of this command are --with-key, --port, --at"],
            ),
            ("serve", &["--config", "tip: `init` writes one"]),
            (
                "service create a --port x",
                &["write a whole number, such as 3000"],
            ),
            ("service create a --at 80", &["such as 127.0.0.1:8443"]),
        ] {
            let message = message(line);
            for tip in tips {
                assert!(message.contains(tip), "{line}: {message}");
            }
        }
        for line in ["service create a --key", "service delete a --yes"] {
            let message = message(line);
            assert!(!message.contains("as a value"), "{message}");
        }
    }
}
