//! Steps of an input: what the caller, the agent and time do.

use std::time::Duration;

use gw_bed::agent::{self, Agent, DATA_MAX};
use gw_bed::http2::{
    ACK, DATA, END_STREAM, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE, frame, headers, preface,
    write_field,
};
use gw_bed::memory::CheckedCaller;
use gw_data_plane::support::memory_worker::{HOST, MemoryWorker, SERVICE_KEY};
use gw_shared::http::Fields;

/// Longest payload of a step.
const PAYLOAD_MAX: usize = 64 * 1024;

pub(super) enum Step {
    /// Bytes of the caller.
    Bytes(Vec<u8>),
    ReadInPiecesOf(usize),
    Take(Option<usize>),
    End,
    Reset,
    Respond {
        of: usize,
        status: u16,
        length: Option<u64>,
        fields: Fields,
    },
    Send {
        of: usize,
        length: usize,
        end: bool,
    },
    SendTrailers {
        of: usize,
        fields: Fields,
    },
    Refuse {
        of: usize,
        code: usize,
    },
    BreakOff(usize),
    ReadUpload(usize),
    AgentBytes(Vec<u8>),
    LoseTunnel,
    /// All deadlines up to this time from now pass.
    Sweep(Duration),
    Drain,
}

impl Step {
    /// Parses a line: a letter, and words that follow it, each after a space. A number that is
    /// missing is 0. Streams, and the agent's requests in their order, are numbers. Steps of the
    /// caller:
    ///
    /// - `P`: the preface and an empty SETTINGS
    /// - `S id value …`: SETTINGS; `A`: its acknowledgment
    /// - `G stream fields`: a whole GET; `Q stream fields`: a POST whose body follows, with these
    ///   additional fields
    /// - `H stream flags fields`: HEADERS with these fields only
    /// - `D stream length flags`: DATA; `U stream increment`: WINDOW_UPDATE; `X stream code`:
    ///   RST_STREAM
    /// - `F kind flags stream payload`: any frame; `R payload`: any bytes. `\xHH` stands for a
    ///   byte.
    /// - `c bytes`: the gateway reads no more at once; `w bytes`: the caller takes no more; `W`: it
    ///   takes all
    /// - `E`: the end of the caller's direction; `K`: the connection is lost
    ///
    /// Fields are `name: value`, separated by `|`. Steps of the agent:
    ///
    /// - `r request status length fields`: a head, of a response without a length if that is `-`
    /// - `d request length end`: data, and the end if `end` is 1; `t request fields`: trailers and
    ///   the end
    /// - `f request code`: an error; `x request`: the response breaks off; `u request`: reads the
    ///   body
    /// - `T payload`: any bytes; `L`: the tunnel is lost
    ///
    /// And `s seconds`: the time of deadlines passes; `!`: the gateway drains. Other lines are no
    /// steps.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let (letter, rest) = line.split_first()?;
        let mut words = Words(rest);
        Some(match letter {
            b'P' => Self::Bytes(preface(&[])),
            b'S' => Self::Bytes(frame(SETTINGS, 0, 0, &words.settings())),
            b'A' => Self::Bytes(frame(SETTINGS, ACK, 0, &[])),
            b'G' => request(words.number(), b"GET", END_STREAM, words.0),
            b'Q' => request(words.number(), b"POST", 0, words.0),
            b'H' => {
                let (stream, flags) = (words.number(), words.number() as u8);
                Self::Bytes(frame(HEADERS, flags, stream, &block(words.0)))
            }
            b'D' => {
                let (stream, length) = (words.number(), words.length());
                Self::Bytes(frame(DATA, words.number() as u8, stream, &vec![0; length]))
            }
            b'U' => {
                let (stream, increment) = (words.number(), words.number());
                Self::Bytes(frame(WINDOW_UPDATE, 0, stream, &increment.to_be_bytes()))
            }
            b'X' => {
                let (stream, code) = (words.number(), words.number());
                Self::Bytes(frame(RST_STREAM, 0, stream, &code.to_be_bytes()))
            }
            b'F' => {
                let (kind, flags) = (words.number() as u8, words.number() as u8);
                let stream = words.number();
                Self::Bytes(frame(kind, flags, stream, &unescape(words.0)))
            }
            b'R' => Self::Bytes(unescape(words.0)),
            b'c' => Self::ReadInPiecesOf(words.length()),
            b'w' => Self::Take(Some(words.length())),
            b'W' => Self::Take(None),
            b'E' => Self::End,
            b'K' => Self::Reset,
            _ => return Self::parse_of_agent(*letter, words),
        })
    }

    fn parse_of_agent(letter: u8, mut words: Words<'_>) -> Option<Self> {
        let of = if matches!(letter, b'r' | b'd' | b't' | b'f' | b'x' | b'u') {
            words.number() as usize
        } else {
            0
        };
        Some(match letter {
            b'r' => Self::Respond {
                of,
                status: words.number() as u16,
                length: words.optional(),
                fields: agent::fields(words.0),
            },
            b'd' => Self::Send {
                of,
                length: words.length().min(DATA_MAX),
                end: words.number() == 1,
            },
            b't' => Self::SendTrailers {
                of,
                fields: agent::fields(words.0),
            },
            b'f' => Self::Refuse {
                of,
                code: words.number() as usize,
            },
            b'x' => Self::BreakOff(of),
            b'u' => Self::ReadUpload(of),
            b'T' => Self::AgentBytes(unescape(words.0)),
            b'L' => Self::LoseTunnel,
            b's' => Self::Sweep(Duration::from_secs(words.number().into())),
            b'!' => Self::Drain,
            _ => return None,
        })
    }

    pub(super) fn take(self, caller: &mut CheckedCaller, agent: &Agent, gateway: &MemoryWorker) {
        let connection = &caller.connection;
        match self {
            Self::Bytes(bytes) => caller.send(&bytes),
            Self::ReadInPiecesOf(bytes) => connection.read_in_pieces_of(bytes),
            Self::Take(bytes) => connection.take(bytes),
            Self::End => connection.end(),
            Self::Reset => connection.reset(),
            Self::Respond {
                of,
                status,
                length,
                fields,
            } => agent.respond(of, status, length, &fields),
            Self::Send { of, length, end } => agent.send(of, length, end),
            Self::SendTrailers { of, fields } => agent.send_trailers(of, &fields),
            Self::Refuse { of, code } => agent.refuse(of, code),
            Self::BreakOff(of) => agent.break_off(of),
            Self::ReadUpload(of) => agent.read(of),
            Self::AgentBytes(bytes) => agent.send_raw(&bytes),
            Self::LoseTunnel => agent.lose(),
            Self::Sweep(time) => gateway.sweep(time),
            Self::Drain => gateway.drain(),
        }
    }
}

/// A request of the service, with its key, and with these additional fields.
fn request(stream: u32, method: &[u8], flags: u8, fields: &[u8]) -> Step {
    let mut head = Vec::new();
    write_field(&mut head, b":method", method);
    write_field(&mut head, b":scheme", b"https");
    write_field(&mut head, b":authority", HOST.as_bytes());
    write_field(&mut head, b":path", agent::path(stream).as_bytes());
    write_field(&mut head, b"x-gw-service-key", SERVICE_KEY.as_bytes());
    head.extend(block(fields));
    Step::Bytes(headers(stream, flags, &head))
}

/// A header block. Names may begin with a colon, and neither names nor values need be valid.
fn block(fields: &[u8]) -> Vec<u8> {
    let mut block = Vec::new();
    for field in fields.split(|byte| *byte == b'|') {
        if let Some(colon) = field.windows(2).position(|pair| pair == b": ") {
            write_field(&mut block, &field[..colon], &field[colon + 2..]);
        }
    }
    block
}

/// The rest of a line.
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn word(&mut self) -> &'a [u8] {
        let text = self.0.strip_prefix(b" ").unwrap_or(self.0);
        let end = text.iter().position(|byte| *byte == b' ');
        let (word, rest) = text.split_at(end.unwrap_or(text.len()));
        self.0 = rest.strip_prefix(b" ").unwrap_or(rest);
        word
    }

    fn optional<T: std::str::FromStr>(&mut self) -> Option<T> {
        std::str::from_utf8(self.word()).ok()?.parse().ok()
    }

    fn number(&mut self) -> u32 {
        self.optional().unwrap_or(0)
    }

    fn length(&mut self) -> usize {
        (self.number() as usize).min(PAYLOAD_MAX)
    }

    fn settings(&mut self) -> Vec<u8> {
        let mut payload = Vec::new();
        while !self.0.is_empty() {
            payload.extend((self.number() as u16).to_be_bytes());
            payload.extend(self.number().to_be_bytes());
        }
        payload
    }
}

/// Replaces each `\xHH`, which input needs for line ends.
fn unescape(mut text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some((first, rest)) = text.split_first() {
        let escaped = text
            .strip_prefix(b"\\x")
            .and_then(|rest| rest.get(..2))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(escaped.unwrap_or(*first));
        text = if escaped.is_some() { &text[4..] } else { rest };
    }
    bytes
}
