//! Outcome of a command and the exit code it gives.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::text::documentation::located;
use crate::text::{escaped, escaped_message};

/// Error that ends a command.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// Wrong usage or configuration: exit code 2.
    Usage(String),
    /// Failure at run time: exit code 1.
    Run(String),
    /// Failure of the program itself, a bug: exit code 3.
    Internal(String),
}

impl Failure {
    pub fn run(error: impl Display) -> Self {
        Self::Run(error.to_string())
    }

    pub fn message(&self) -> &str {
        match self {
            Self::Usage(message) | Self::Run(message) | Self::Internal(message) => message,
        }
    }

    fn code(&self) -> u8 {
        match self {
            Self::Run(_) => 1,
            Self::Usage(_) => 2,
            Self::Internal(_) => 3,
        }
    }
}

/// Ends `program`: writes the message of a failure to standard error and returns the exit code.
pub fn exit(program: &str, result: Result<(), Failure>) -> ExitCode {
    let Err(failure) = result else {
        return ExitCode::SUCCESS;
    };
    note(program, failure.message());
    ExitCode::from(failure.code())
}

/// Writes a message of `program` to standard error, with hidden characters escaped: it may quote a
/// peer. Pages of the documentation are named where they are installed.
pub fn note(program: &str, message: impl Display) {
    let message = located(&message.to_string());
    // One write, since other processes may write to the same log. A failed write cannot be
    // reported.
    let _ =
        io::stderr().write_all(format!("{program}: {}\n", escaped_message(&message)).as_bytes());
}

/// Quotes `text` as one word of a shell, with hidden characters escaped.
pub fn quoted(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-:=@%+".contains(&byte);
    if !text.is_empty() && text.bytes().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", escaped(text).replace('\'', r"'\''"))
    }
}

/// `sudo` before a printed command, if this one was called with it.
pub fn sudo() -> &'static str {
    if std::env::var_os("SUDO_USER").is_some() {
        "sudo "
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_failure_has_its_exit_code() {
        // Service managers and docs/deployment.md know these.
        let failures = [Failure::Run, Failure::Usage, Failure::Internal]
            .map(|kind| kind(String::new()).code());
        assert_eq!(failures, [1, 2, 3]);
    }
}
