//! Captures messages while they are relayed. Each copy is bounded by [`CAPTURE_MAX`], and all
//! together by a budget of their worker.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bytes::{Bytes, BytesMut};
use gw_shared::http::{Fields, fields};
use gw_store::Captures;
use http::header::HeaderValue;

use crate::request_log::record::{BodyCapture, CAPTURE_MAX, Capture, MessageCapture, Truncation};

/// Remaining bytes for captures in progress on one worker.
#[derive(Debug)]
pub struct CaptureBudget(Cell<usize>);

impl CaptureBudget {
    /// Creates a budget of this many bytes.
    pub fn new(bytes: usize) -> Rc<Self> {
        Rc::new(Self(Cell::new(bytes)))
    }

    /// Takes up to `wanted` bytes and returns their number.
    fn take(&self, wanted: usize) -> usize {
        let taken = wanted.min(self.0.get());
        self.0.set(self.0.get() - taken);
        taken
    }

    fn give_back(&self, bytes: usize) {
        self.0.set(self.0.get() + bytes);
    }
}

/// Capture of one exchange. Empty until [`Self::begin`] is called for a service that captures
/// messages.
#[derive(Default)]
pub struct Capturing(RefCell<Option<Box<Halves>>>);

struct Halves {
    request: Option<Half>,
    response: Option<Half>,
}

struct Half {
    headers: Fields,
    body: BytesMut,
    /// Reason for which the rest of the body was left out.
    cut: Option<Truncation>,
    /// The end of the message was seen.
    whole: bool,
    budget: Rc<CaptureBudget>,
}

impl Capturing {
    /// Begins to capture the `wanted` messages, with `headers` as the fields of the request.
    pub fn begin(&self, wanted: Captures, budget: &Rc<CaptureBudget>, headers: &Fields) {
        if wanted != Captures::default() {
            let half = |headers| Half::new(headers, budget);
            self.0.replace(Some(Box::new(Halves {
                request: wanted.requests.then(|| half(without_credentials(headers))),
                response: wanted.responses.then(|| half(Fields::new())),
            })));
        }
    }

    /// Drops the capture of both messages.
    pub fn abandon(&self) {
        self.0.take();
    }

    /// Drops the capture of the request, which was not relayed.
    pub fn request_not_relayed(&self) {
        if let Some(halves) = self.0.borrow_mut().as_mut() {
            halves.request = None;
        }
    }

    /// Adds a part of the request's body.
    pub fn request_data(&self, data: &Bytes) {
        self.of_request(|half| half.append(data));
    }

    /// Marks the request as whole.
    pub fn request_ends(&self) {
        self.of_request(|half| half.whole = true);
    }

    /// Sets the fields of the response. Credentials are left out.
    pub fn response_head(&self, headers: &Fields) {
        self.of_response(|half| half.headers = without_credentials(headers));
    }

    /// Adds a part of the response's body.
    pub fn response_data(&self, data: &Bytes) {
        self.of_response(|half| half.append(data));
    }

    /// Marks the response as whole.
    pub fn response_ends(&self) {
        self.of_response(|half| half.whole = true);
    }

    /// Ends the capture and returns it. The response is included only if there was one.
    pub fn finish(&self, has_response: bool) -> Option<Box<Capture>> {
        let Halves { request, response } = *self.0.take()?;
        let request = request.map(Half::finish);
        let response = response.filter(|_| has_response).map(Half::finish);
        let is_any = request.is_some() || response.is_some();
        is_any.then(|| Box::new(Capture { request, response }))
    }

    fn of_request(&self, note: impl FnOnce(&mut Half)) {
        self.0
            .borrow_mut()
            .as_mut()
            .and_then(|halves| halves.request.as_mut())
            .map(note);
    }

    fn of_response(&self, note: impl FnOnce(&mut Half)) {
        self.0
            .borrow_mut()
            .as_mut()
            .and_then(|halves| halves.response.as_mut())
            .map(note);
    }
}

impl Half {
    fn new(headers: Fields, budget: &Rc<CaptureBudget>) -> Self {
        Self {
            headers,
            body: BytesMut::new(),
            cut: None,
            whole: false,
            budget: Rc::clone(budget),
        }
    }

    fn append(&mut self, data: &[u8]) {
        // A capture has no gaps: all bytes after the first omitted one are left out.
        if self.cut.is_some() {
            return;
        }
        let room = data.len().min(CAPTURE_MAX - self.body.len());
        let taken = self.budget.take(room);
        self.body.extend_from_slice(&data[..taken]);
        self.cut = match taken {
            _ if taken < room => Some(Truncation::Memory),
            _ if room < data.len() => Some(Truncation::Size),
            _ => None,
        };
    }

    fn finish(mut self) -> MessageCapture {
        // The budget covers captures in progress. From here on the limit of the log's queue
        // applies.
        let headers = std::mem::take(&mut self.headers);
        // The buffer may have twice the capacity of its contents, and the log's queue counts
        // contents only.
        let has_room = self.body.capacity() > self.body.len() + self.body.len() / 8;
        let body = if has_room {
            Bytes::copy_from_slice(&self.body)
        } else {
            self.body.split().freeze()
        };
        self.body.clear();
        self.budget.give_back(body.len());
        let truncated_by = self
            .cut
            .or((!self.whole).then_some(Truncation::Interrupted));
        MessageCapture {
            headers,
            body: BodyCapture {
                bytes: body,
                truncated: truncated_by.is_some(),
                truncated_by,
            },
        }
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        self.budget.give_back(self.body.len());
    }
}

/// Copies all fields except those with credentials.
fn without_credentials(headers: &Fields) -> Fields {
    let kept = headers
        .iter()
        .filter(|(name, _)| !fields::is_credential(name));
    // A shared value would keep the whole receive buffer alive.
    kept.filter_map(|(name, value)| {
        Some((
            name.clone(),
            HeaderValue::from_bytes(value.as_bytes()).ok()?,
        ))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use http::header::HeaderName;

    use super::*;

    const BOTH: Captures = Captures {
        requests: true,
        responses: true,
    };

    fn headers(fields: &[(&'static str, &'static str)]) -> Fields {
        fields
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    #[test]
    fn nothing_is_captured_unless_wanted() {
        let capturing = Capturing::default();
        let budget = CaptureBudget::new(100);
        capturing.begin(Captures::default(), &budget, &Fields::new());
        capturing.request_data(&Bytes::from_static(b"x"));
        assert!(capturing.finish(true).is_none());
    }

    #[test]
    fn credentials_are_left_out_and_interrupted_bodies_are_marked() {
        let capturing = Capturing::default();
        let budget = CaptureBudget::new(100);
        let sent = headers(&[
            ("authorization", "Bearer x"),
            ("cookie", "a=b"),
            ("x-gw-service-key", "gw_sk_x.y"),
            ("accept", "text/plain"),
        ]);
        capturing.begin(BOTH, &budget, &sent);
        capturing.request_data(&Bytes::from_static(b"ab"));
        capturing.request_data(&Bytes::from_static(b"c"));
        capturing.request_ends();
        capturing.response_head(&headers(&[
            ("set-cookie", "a=b"),
            ("content-type", "text/plain"),
        ]));
        capturing.response_data(&Bytes::from_static(b"par"));
        assert_eq!(budget.0.get(), 94);
        let capture = capturing.finish(true).unwrap();
        let request = capture.request.unwrap();
        let response = capture.response.unwrap();
        assert_eq!(request.headers, headers(&[("accept", "text/plain")]));
        assert_eq!(
            (
                &request.body.bytes[..],
                request.body.truncated,
                request.body.truncated_by
            ),
            (&b"abc"[..], false, None)
        );
        assert_eq!(response.headers, headers(&[("content-type", "text/plain")]));
        assert_eq!(
            (&response.body.bytes[..], response.body.truncated),
            (&b"par"[..], true)
        );
        assert_eq!(response.body.truncated_by, Some(Truncation::Interrupted));
        assert_eq!(budget.0.get(), 100);
    }

    #[test]
    fn captures_are_bounded_by_size_and_budget() {
        let capturing = Capturing::default();
        let budget = CaptureBudget::new(CAPTURE_MAX + 10);
        capturing.begin(BOTH, &budget, &Fields::new());
        let piece = Bytes::from(vec![0; CAPTURE_MAX - 1]);
        capturing.request_data(&piece);
        capturing.request_data(&piece);
        capturing.request_ends();
        capturing.response_data(&piece);
        capturing.response_ends();
        let capture = capturing.finish(true).unwrap();
        let request = capture.request.unwrap().body;
        let response = capture.response.unwrap().body;
        assert_eq!(
            (request.bytes.len(), request.truncated),
            (CAPTURE_MAX, true)
        );
        assert_eq!((response.bytes.len(), response.truncated), (10, true));
        assert_eq!(
            (request.truncated_by, response.truncated_by),
            (Some(Truncation::Size), Some(Truncation::Memory))
        );
        assert_eq!(budget.0.get(), CAPTURE_MAX + 10);
    }

    #[test]
    fn truncated_capture_has_no_gap_when_memory_is_free_again() {
        let capturing = Capturing::default();
        let budget = CaptureBudget::new(4);
        capturing.begin(
            Captures {
                requests: true,
                responses: false,
            },
            &budget,
            &Fields::new(),
        );
        capturing.request_data(&Bytes::from_static(b"abcdef"));
        budget.give_back(100);
        capturing.request_data(&Bytes::from_static(b"ghi"));
        capturing.request_ends();
        let body = capturing.finish(false).unwrap().request.unwrap().body;
        assert_eq!(
            (&body.bytes[..], body.truncated_by),
            (&b"abcd"[..], Some(Truncation::Memory))
        );
    }

    #[test]
    fn request_that_was_not_relayed_leaves_no_capture_and_frees_its_budget() {
        let capturing = Capturing::default();
        let budget = CaptureBudget::new(10);
        capturing.begin(BOTH, &budget, &Fields::new());
        capturing.request_data(&Bytes::from_static(b"abc"));
        capturing.request_not_relayed();
        assert_eq!(budget.0.get(), 10);
        // Later data of the request is not captured.
        capturing.request_data(&Bytes::from_static(b"def"));
        assert_eq!(budget.0.get(), 10);
        assert!(capturing.finish(false).is_none());
    }

    #[test]
    fn dropped_capture_frees_its_budget() {
        let capturing = Capturing::default();
        let budget = CaptureBudget::new(10);
        capturing.begin(
            Captures {
                requests: true,
                responses: false,
            },
            &budget,
            &Fields::new(),
        );
        capturing.request_data(&Bytes::from_static(b"abc"));
        drop(capturing);
        assert_eq!(budget.0.get(), 10);
    }
}
