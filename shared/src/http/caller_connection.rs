//! The caller's connection that a request came on, for backends that authenticate connections
//! ([`connection_auth`](super::connection_auth)): the agent gives it connections of its own.

use std::fmt;

use aws_lc_rs::rand;
use http::header::{HeaderName, HeaderValue};

use super::Fields;

/// Field of a REQUEST. Neither callers nor backends can set it, and the agent does not pass it on.
const FIELD: HeaderName = HeaderName::from_static("x-gw-caller-connection");

/// Value of the field without a name.
const UNNAMED: &str = "unnamed";

/// A connection of a caller that has sent credentials for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerConnection {
    Named(CallerName),
    /// A connection whose requests may be those of several users. This one needs a connection to
    /// the backend for itself.
    Unnamed,
}

/// Random name of a caller's connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallerName([u8; 16]);

impl CallerConnection {
    /// A connection with a new name.
    pub fn name_randomly() -> Self {
        let mut random = [0; 16];
        match rand::fill(&mut random) {
            Ok(()) => Self::Named(CallerName(random)),
            // Safe without a name: the backend asks for credentials with each request.
            Err(_) => Self::Unnamed,
        }
    }

    pub fn name(self) -> Option<CallerName> {
        match self {
            Self::Named(name) => Some(name),
            Self::Unnamed => None,
        }
    }

    /// Adds the field to those of a request.
    pub(crate) fn put(self, headers: &mut Fields) {
        let value = match self {
            Self::Named(CallerName(bytes)) => {
                HeaderValue::try_from(format!("{:032x}", u128::from_be_bytes(bytes))).ok()
            }
            Self::Unnamed => Some(HeaderValue::from_static(UNNAMED)),
        };
        // Never absent: the digits are a valid value.
        headers.extend(value.map(|value| (FIELD, value)));
    }

    /// Removes the field from those of a request. A value that is no name means that the connection
    /// has none.
    pub fn take(headers: &mut Fields) -> Option<Self> {
        let value = headers.remove(FIELD)?;
        let digits = value.to_str().ok().filter(|digits| digits.len() == 32);
        let name = digits.and_then(|digits| u128::from_str_radix(digits, 16).ok());
        Some(name.map_or(Self::Unnamed, |name| {
            Self::Named(CallerName(name.to_be_bytes()))
        }))
    }
}

/// Without the name, which no log is to have.
impl fmt::Debug for CallerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallerName")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_pass_and_other_values_are_none() {
        let named = CallerConnection::name_randomly();
        assert_ne!(named.name(), CallerConnection::name_randomly().name());
        for sent in [named, CallerConnection::Unnamed] {
            let mut headers = Fields::new();
            sent.put(&mut headers);
            assert_eq!(CallerConnection::take(&mut headers), Some(sent));
            assert_eq!(CallerConnection::take(&mut headers), None);
        }
        for value in ["", "1", "once"] {
            let value = HeaderValue::from_static(value);
            let mut headers = Fields::from_iter([(FIELD, value)]);
            let taken = CallerConnection::take(&mut headers);
            assert_eq!(taken, Some(CallerConnection::Unnamed));
        }
    }
}
