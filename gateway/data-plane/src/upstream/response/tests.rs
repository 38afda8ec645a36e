use super::*;

fn traits(is_head: bool, protocol: Option<&'static str>) -> RequestTraits {
    RequestTraits {
        is_head,
        protocol: protocol.map(|name| Box::new(UpgradeProtocol::from_static(name))),
    }
}

fn received(
    head: &str,
    request: &RequestTraits,
    is_whole: bool,
) -> Result<RelayedHead, InvalidResponse> {
    let head = [&[0; 8], head.as_bytes(), b"\r\n"].concat();
    let response = head::parse_response(head.into(), request.method())
        .map_err(|_| InvalidResponse::Malformed)?;
    assert_eq!(
        response.timing,
        AgentTiming {
            agent_us: 0,
            backend_first_byte_us: Some(0)
        }
    );
    final_head(response, request, is_whole).map(|(head, _)| head)
}

#[test]
fn a_response_has_a_body_unless_it_ends_with_its_head_or_never_has_one() {
    let has_body = |head: &str, is_head, is_whole| {
        received(head, &traits(is_head, None), is_whole)
            .unwrap()
            .has_body
    };
    for fields in [
        "",
        "content-length: 5\r\n",
        "transfer-encoding: chunked\r\n",
        "content-length: 0\r\n",
    ] {
        assert!(
            has_body(&format!("HTTP/1.1 200 OK\r\n{fields}"), false, false),
            "{fields}"
        );
        assert!(
            !has_body(&format!("HTTP/1.1 200 OK\r\n{fields}"), true, false),
            "{fields}"
        );
        for status in ["204 No Content", "304 Not Modified"] {
            assert!(
                !has_body(&format!("HTTP/1.1 {status}\r\n{fields}"), false, false),
                "{status}, {fields}"
            );
        }
    }
    for fields in [
        "",
        "transfer-encoding: chunked\r\n",
        "content-length: 0\r\n",
    ] {
        assert!(
            !has_body(&format!("HTTP/1.1 200 OK\r\n{fields}"), false, true),
            "{fields}"
        );
    }
    let cut = received(
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n",
        &traits(false, None),
        true,
    );
    assert_eq!(cut.unwrap_err(), InvalidResponse::Malformed);
}

#[test]
fn fields_of_the_hop_and_padding_are_removed() {
    let head = "HTTP/1.1 200 OK\r\nConnection: x-a\r\nX-A: 1\r\nX-Gw-Status: forged\r\n\
                Upgrade: h2c\r\nX-B: \t b \r\nContent-Length: 0\r\n";
    let head = received(head, &traits(false, None), true).unwrap();
    let fields: Vec<_> = head
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect();
    assert_eq!(fields, [("x-b", &b"b"[..]), ("content-length", b"0")]);
}

#[test]
fn invalid_heads_are_refused() {
    let request = traits(false, None);
    let invalid = |head: &str| received(head, &request, false).unwrap_err();
    assert_eq!(
        invalid("HTTP/1.1 103 Early Hints\r\n"),
        InvalidResponse::Status(StatusCode::EARLY_HINTS)
    );
    assert_eq!(
        invalid("HTTP/1.1 600 x\r\n"),
        InvalidResponse::Status(StatusCode::from_u16(600).unwrap())
    );
    let many: String = (0..1001)
        .map(|number| format!("x-{number}: a\r\n"))
        .collect();
    assert_eq!(
        invalid(&format!("HTTP/1.1 200 OK\r\n{many}")),
        InvalidResponse::TooManyFields
    );
    for fields in [
        "content-length: 1\r\ncontent-length: 1\r\n",
        "content-length: x\r\n",
        "a\r\n",
        "a: \0\r\n",
    ] {
        assert_eq!(
            invalid(&format!("HTTP/1.1 200 OK\r\n{fields}")),
            InvalidResponse::Malformed,
            "{fields}"
        );
    }
}

#[test]
fn a_switch_is_accepted_only_as_requested() {
    let asked = traits(false, Some("websocket"));
    let head = received(
        "HTTP/1.1 101 x\r\nupgrade: WebSocket\r\ncontent-length: 5\r\n",
        &asked,
        false,
    )
    .unwrap();
    assert_eq!(
        head.upgrade,
        Some(UpgradeProtocol::from_static("websocket"))
    );
    assert!(head.has_body && head.headers.is_empty());
    for (fields, request, invalid) in [
        (
            "upgrade: websocket\r\n",
            &traits(false, None),
            InvalidResponse::Unasked,
        ),
        ("upgrade: other\r\n", &asked, InvalidResponse::OtherProtocol),
        (
            "upgrade: websocket\r\nupgrade: websocket\r\n",
            &asked,
            InvalidResponse::OtherProtocol,
        ),
        ("", &asked, InvalidResponse::OtherProtocol),
    ] {
        let refused = received(&format!("HTTP/1.1 101 x\r\n{fields}"), request, false).unwrap_err();
        assert_eq!(refused, invalid, "{fields}");
    }
    let other = received("HTTP/1.1 200 OK\r\nupgrade: websocket\r\n", &asked, false).unwrap();
    assert_eq!((other.upgrade, other.status), (None, StatusCode::OK));
}

#[test]
fn interim_responses_are_bounded_and_cleaned() {
    let mut budget = InterimBudget::default();
    let mut take =
        |head: &'static str| interim_head(&Bytes::from_static(head.as_bytes()), &mut budget);
    let hints = take("HTTP/1.1 103 x\r\nlink: </a>\r\ncontent-length: 5\r\nx-gw-status: x\r\n\r\n")
        .unwrap();
    assert_eq!(
        (hints.status, hints.headers.len()),
        (StatusCode::EARLY_HINTS, 1)
    );
    assert_eq!(
        take("HTTP/1.1 103\r\n").unwrap_err(),
        InvalidResponse::Malformed
    );
    let switch = take("HTTP/1.1 101 x\r\n\r\n").unwrap_err();
    assert_eq!(
        switch,
        InvalidResponse::Status(StatusCode::SWITCHING_PROTOCOLS)
    );
}
