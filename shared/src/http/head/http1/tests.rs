use super::super::tests::LIMITS;
use super::*;
use crate::http::write::{ConnectionField, write_request, write_response};
use crate::testing::fields;

fn request(text: &str) -> Result<RequestHead, InvalidHead> {
    parse_request(&Bytes::copy_from_slice(text.as_bytes()), LIMITS)
}

fn response(text: &str, method: &Method) -> Result<ResponseHead, InvalidHead> {
    parse_response(&Bytes::copy_from_slice(text.as_bytes()), method, LIMITS)
}

#[test]
fn method_target_authority_and_fields_keep_every_byte() {
    let head = request(
        "PoST /a%2F//b?x=1&y=%00 HTTP/1.1\r\nHost: A.b:80\r\nX-One: 1\r\nx-one:  2 \r\n\r\n",
    )
    .unwrap();
    assert_eq!(head.method.as_str(), "PoST");
    assert_eq!(head.target.as_str(), "/a%2F//b?x=1&y=%00");
    assert_eq!(head.authority.as_str(), "A.b:80");
    let values: Vec<_> = head.headers.get_all("x-one").collect();
    assert_eq!(values, ["1", "2"]);
    assert!(head.keep_alive && !head.expects_continue && head.framing == Framing::None);
}

#[test]
fn values_keep_every_allowed_byte() {
    let allowed: Vec<u8> = (0..=u8::MAX)
        .filter(|byte| !byte.is_ascii_control() || *byte == b'\t')
        .collect();
    let value = [b"x", &allowed[..], b"x"].concat();
    let head = |line: &str| {
        let line = [line.as_bytes(), b"\r\nHost: h\r\nX: "].concat();
        Bytes::from([&line[..], &value, b"\r\n\r\n"].concat())
    };
    let request = parse_request(&head("GET / HTTP/1.1"), LIMITS).unwrap();
    assert_eq!(request.headers["x"].as_bytes(), value);
    let response = parse_response(&head("HTTP/1.1 200 ü"), &Method::GET, LIMITS).unwrap();
    assert_eq!(response.headers["x"].as_bytes(), value);
}

#[test]
fn all_target_forms_are_parsed() {
    let with = |line: &str| request(&format!("{line} HTTP/1.1\r\nHost: h\r\n\r\n"));
    for (line, authority, target) in [
        (
            "GET http://other.example:81/p?q",
            "other.example:81",
            "/p?q",
        ),
        ("GET https://h", "h", "/"),
        ("OPTIONS *", "h", "*"),
        ("OPTIONS http://h", "h", "*"),
        ("GET http://h?q=1", "h", "/?q=1"),
    ] {
        let head = with(line).unwrap();
        assert_eq!(head.authority.as_str(), authority, "{line}");
        assert_eq!(head.target.as_str(), target, "{line}");
    }
    for bad in [
        "GET *",
        "CONNECT h:1",
        "GET foo",
        "GET ftp://h/",
        "GET /a#b",
        "GET http:///x",
    ] {
        assert!(with(bad).is_err(), "{bad}");
    }
}

#[test]
fn an_upgrade_names_one_protocol_other_than_http() {
    let upgrade = |fields: &str| {
        let head = request(&format!("GET / HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        head.unwrap().upgrade
    };
    for (connection, protocol) in [
        ("keep-alive, Upgrade", "websocket"),
        ("upgrade", "SPDY/3.1"),
    ] {
        let offered = upgrade(&format!(
            "Connection: {connection}\r\nUpgrade: {protocol}\r\n"
        ));
        assert_eq!(offered.unwrap().as_str(), protocol);
    }
    for length in [0, 1, 65_536] {
        let content = format!("Content-Length: {length}\r\n");
        assert!(upgrade(&format!("Connection: upgrade\r\nUpgrade: a\r\n{content}")).is_some());
    }
    for none in [
        "Upgrade: websocket\r\n",
        "Connection: upgrade\r\n",
        "Connection: upgrade\r\nUpgrade: h2c\r\n",
        "Connection: upgrade\r\nUpgrade: HTTP/2.0\r\n",
        "Connection: upgrade\r\nUpgrade: websocket, h2c\r\n",
        "Connection: upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n",
        "Connection: upgrade\r\nUpgrade: a b\r\n",
        "Connection: upgrade\r\nUpgrade:\r\n",
        "Connection: upgrade\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n",
        "Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 65537\r\n",
    ] {
        assert_eq!(upgrade(none), None, "{none:?}");
    }
}

#[test]
fn framing_and_persistence_follow_the_fields() {
    let post = |fields: &str| {
        let head = request(&format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        head.unwrap()
    };
    for (fields, framing) in [
        ("Content-Length: 5\r\n", Framing::Length(5)),
        ("Content-Length: 0\r\n", Framing::Length(0)),
        ("Content-Length: 005\r\n", Framing::Length(5)),
        (
            "Content_Length: 5\r\nTransfer_Encoding: chunked\r\n",
            Framing::None,
        ),
        ("Transfer-Encoding: Chunked\r\n", Framing::Chunked),
    ] {
        assert_eq!(post(fields).framing, framing, "{fields:?}");
    }
    assert!(post("Content-Length: 5\r\nExpect: 100-Continue\r\n").expects_continue);
    // Empty elements of a list are ignored (RFC 9110 §5.6.1.2).
    for closing in ["x, Close", ",, Close ,,", "x\r\nConnection: close"] {
        assert!(!post(&format!("Connection: {closing}\r\n")).keep_alive);
    }
    let keep_alive = "Connection: keep-alive\r\n";
    let keep_alive_and_length = "Connection: keep-alive\r\nContent-Length: 0\r\n";
    for (line, fields, persists) in [
        ("GET /", "", false),
        ("GET /", keep_alive, true),
        ("HEAD /", keep_alive, true),
        ("POST /", keep_alive_and_length, true),
        ("POST /", keep_alive, false),
        ("PUT /", keep_alive, false),
        ("X /", keep_alive, false),
    ] {
        let head = request(&format!("{line} HTTP/1.0\r\nHost: h\r\n{fields}\r\n"));
        assert_eq!(head.unwrap().keep_alive, persists, "{line} {fields:?}");
    }
}

fn is_syntax_error<T>(parsed: &Result<T, InvalidHead>) -> bool {
    matches!(parsed, Err(InvalidHead::Syntax(_)))
}

#[test]
fn ambiguous_requests_are_refused() {
    for fields in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: 5 5\r\n",
        "Content-Length:\r\n",
        "Content-Length: 18446744073709551616\r\n",
        "Content-Length: 00000000000000000005\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding:\x0bchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "X: a\r\n b\r\n",
        " X: a\r\n",
        "X: a\nY: b\r\n",
        "X: a\rY: b\r\n",
        "X: a\0b\r\n",
        "X\r\n",
        ": x\r\n",
        "X Y: z\r\n",
        "Host: other\r\n",
    ] {
        let result = request(&format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        assert!(is_syntax_error(&result), "{fields:?}: {result:?}");
    }
    for text in [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: user@h\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h/p\r\n\r\n",
        "GET /  HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET / HTTP/2.0\r\nHost: h\r\n\r\n",
        "GET / HTTP/1.10\r\nHost: h\r\n\r\n",
        "GET / HTTP/1.x\r\nHost: h\r\n\r\n",
        "GET / http/1.2\r\nHost: h\r\n\r\n",
        "GET /HTTP/1.2\r\nHost: h\r\n\r\n",
        "GET / HTTP/1.1 \r\nHost: h\r\n\r\n",
        "G(T / HTTP/1.1\r\nHost: h\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
    ] {
        assert!(is_syntax_error(&request(text)), "{text:?}");
    }
}

#[test]
fn ambiguous_responses_are_refused() {
    for text in [
        "HTTP/1.1 200 OK\r\n X: a\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX : a\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\rY: b\r\n\r\n",
        "HTTP/1.1 200 O\rK\r\nX: a\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\nY: b\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX\r\n\r\n",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
    ] {
        let refused = response(text, &Method::GET);
        assert!(is_syntax_error(&refused), "{text:?}: {refused:?}");
    }
}

#[test]
fn http_1_0_requests_have_no_upgrade_and_no_expectation() {
    for (version, is_known) in [("1.0", false), ("1.1", true)] {
        let upgrade = "Connection: upgrade\r\nUpgrade: websocket\r\n";
        let head = request(&format!("GET / HTTP/{version}\r\nHost: h\r\n{upgrade}\r\n"));
        assert_eq!(head.unwrap().upgrade.is_some(), is_known, "{version}");
        let expect = "Content-Length: 1\r\nExpect: 100-continue\r\n";
        let head = request(&format!("POST / HTTP/{version}\r\nHost: h\r\n{expect}\r\n"));
        assert_eq!(head.unwrap().expects_continue, is_known, "{version}");
    }
}

#[test]
fn errors_name_the_exceeded_limit() {
    let long_target = format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "a".repeat(100));
    let error = request(&long_target).unwrap_err();
    assert_eq!(error, InvalidHead::TargetTooLong(100));
    for fields in [10, FIELDS_MAX] {
        let fields = "a: b\r\n".repeat(fields);
        let error = request(&format!("GET / HTTP/1.1\r\nHost: h\r\n{fields}\r\n")).unwrap_err();
        assert_eq!(error, InvalidHead::TooManyFields(10));
    }
}

#[test]
fn responses_have_as_many_fields_as_their_limit_allows() {
    let limits = HeadLimits {
        head: usize::MAX,
        fields: 1000,
        target: 0,
    };
    let with = |fields: usize| {
        let text = format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(fields));
        parse_response(&text.into(), &Method::GET, limits)
    };
    for fields in [FIELDS_MAX, FIELDS_MAX + 1, 1000] {
        assert_eq!(with(fields).unwrap().headers.len(), fields);
    }
    assert_eq!(with(1001).unwrap_err(), InvalidHead::TooManyFields(1000));
}

#[test]
fn response_framing_follows_method_and_status() {
    const LENGTH: &str = "Content-Length: 7\r\n";
    const CHUNKED: &str = "Transfer-Encoding: chunked\r\n";
    for (line, fields, method, framing, keep_alive) in [
        ("1.1 200 OK", LENGTH, Method::GET, Framing::Length(7), true),
        (
            "1.1 200 OK",
            "Content-Length: 0\r\n",
            Method::GET,
            Framing::Length(0),
            true,
        ),
        (
            "1.1 200 OK",
            LENGTH,
            Method::HEAD,
            Framing::Described(7),
            true,
        ),
        ("1.1 200 OK", "", Method::HEAD, Framing::None, true),
        ("1.1 200 OK", CHUNKED, Method::HEAD, Framing::None, true),
        ("1.1 200 OK", CHUNKED, Method::GET, Framing::Chunked, true),
        ("1.1 200 OK", "", Method::GET, Framing::UntilClose, false),
        ("1.1 304 x", "", Method::GET, Framing::None, true),
        (
            "1.1 304 x",
            LENGTH,
            Method::GET,
            Framing::Described(7),
            true,
        ),
        ("1.1 204 x", LENGTH, Method::HEAD, Framing::None, true),
        ("1.1 100 ", "", Method::GET, Framing::None, true),
        ("1.0 200 OK", LENGTH, Method::GET, Framing::Length(7), false),
    ] {
        let head = response(&format!("HTTP/{line}\r\n{fields}\r\n"), &method).unwrap();
        assert_eq!(head.framing, framing, "{line} {fields:?} {method}");
        assert_eq!(head.keep_alive, keep_alive, "{line} {fields:?} {method}");
    }
    for bad in [
        "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
        "HTTP/1.10 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ] {
        assert!(response(bad, &Method::GET).is_err(), "{bad:?}");
    }
}

#[test]
fn options_in_connection_are_bounded() {
    let with = |first: usize, second: usize| {
        let first = vec!["x"; first].join(",");
        let second = vec!["y"; second].join(", ");
        let fields = format!("Connection: {first}\r\nConnection: {second}\r\n\r\n");
        let request = request(&format!("GET / HTTP/1.1\r\nHost: h\r\n{fields}")).map(drop);
        let response = response(&format!("HTTP/1.1 200 OK\r\n{fields}"), &Method::GET).map(drop);
        (request, response)
    };
    assert_eq!(with(1, 63), (Ok(()), Ok(())));
    let refused = Err(InvalidHead::Syntax("too many options in Connection"));
    assert_eq!(with(32, 33), (refused.clone(), refused));
}

#[test]
fn later_minor_versions_are_parsed_as_http_1_1() {
    for version in ["1.2", "1.9"] {
        let text = format!("POST /a?b HTTP/{version}\r\nHost: h\r\nContent-Length: 3\r\n\r\n");
        let head = request(&text).unwrap();
        assert_eq!(head.version, HttpVersion::Http11);
        assert_eq!(head.target.as_str(), "/a?b");
        assert_eq!((head.framing, head.keep_alive), (Framing::Length(3), true));
        let text = format!("HTTP/{version} 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        let head = response(&text, &Method::GET).unwrap();
        assert_eq!(head.version, HttpVersion::Http11);
        assert_eq!((head.framing, head.keep_alive), (Framing::Chunked, true));
    }
}

#[test]
fn written_heads_parse_back() {
    let headers = fields(&[("x", "1"), ("x", "2")]);
    let mut out = Vec::new();
    let target = PathAndQuery::from_static("/a?b");
    let persists = ConnectionField::Persists;
    let chunked = Framing::Chunked;
    write_request(
        &mut out,
        &Method::PUT,
        &target,
        b"h",
        &headers,
        chunked,
        persists,
    );
    let head = parse_request(&Bytes::from(out), LIMITS).unwrap();
    assert_eq!(head.framing, chunked);
    assert_eq!(head.headers.get_all("x").count(), 2);
    let mut out = Vec::new();
    let framing = Framing::Length(3);
    write_response(
        &mut out,
        StatusCode::OK,
        &headers,
        framing,
        ConnectionField::Close,
    );
    let head = parse_response(&Bytes::from(out), &Method::GET, LIMITS).unwrap();
    assert_eq!((head.framing, head.keep_alive), (framing, false));
}
